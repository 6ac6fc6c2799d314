"""Prefill a corpus into a store ahead of time, by one process, several, or Ray Data actors.

    texts      the corpus, read as a stream, each text once
    worker     one engine that looks texts up and prefills what is missing; its settings and reports
    processes  workers of this machine that may die
    ray_data   workers that Ray Data places on a cluster
    run        the whole: hand out, count, show progress, tidy up

There is no list of what is done: the store has it.  So a build that was stopped in any way
continues, and a corpus that grew only costs its growth.
"""
