"""Jobs of a cluster for the live page of `pseudoreal ui`: the list, and the page of each job.

`table` watches the jobs, `job_feed` reads one job with its pods, events and logs, and `cluster` joins them as a source.
Everything goes through the API server with the user's own rights; nothing is written.
"""
