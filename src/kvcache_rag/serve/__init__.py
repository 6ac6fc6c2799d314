"""One endpoint over shared caches: requests wait, their chunks are prefilled ahead, all is HTTP.

    work       what a request is between HTTP and model, and what a backend answers
    scheduler  who comes next: in order of arrival, taking turns between tenants
    prefetcher what waiting requests will need is computed or loaded before their turn
    local      a backend over engines of this process

The HTTP side needs the extra `serve`, these four do not; nothing of it is imported by
`import kvcache_rag`.
"""
