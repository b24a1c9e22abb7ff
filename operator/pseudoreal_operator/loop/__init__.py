"""The loop over all jobs: what wakes them, the queue, one pass; and kopf's side of it.

It decides nothing about a job: `lifecycle` does.
"""
