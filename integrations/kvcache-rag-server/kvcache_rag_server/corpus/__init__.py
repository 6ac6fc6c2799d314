"""Prefill a corpus into a store ahead of time, by one process, several, or Ray Data actors.

    texts      the corpus, read as a stream, each text once
    worker     one engine that looks texts up and prefills what is missing; its settings and reports
    processes  workers of this machine that may die
    ray_data   workers that Ray Data places on a cluster
    run        the whole: hand out, count, show progress, tidy up

There is no list of what is done: the store is the truth.  So a build that was stopped, whichever
way, goes on where it was, and a corpus that grew costs what it grew by.
"""
