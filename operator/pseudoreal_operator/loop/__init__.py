"""The loop over all jobs: the routing of events, the queue, the reconcile pass, and kopf's watch.

Decisions about a job are made in `lifecycle`.
"""
