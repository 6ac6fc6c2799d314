"""One HTTP endpoint over shared caches: requests wait while their chunks are prefetched.

completions  the two routes that answer
requests     what clients send, and the `BackendRequest` that it makes
packed       documents that apps wrote into messages
lifecycle    a request from its admission to the last byte of its answer
responses    what clients get
errors       what they read of whatever went wrong; validation: of a body
backend      what a request is between HTTP and model, and what a backend answers
local        a backend over the engines of this process
calls        a request as a call of the engine, logits: what it changes in them or wants told
queue        what waits, scheduler: who comes next, worker: who answers it
"""
