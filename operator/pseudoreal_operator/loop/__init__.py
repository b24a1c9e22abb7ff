"""The loop over all jobs: events that queue them, the queue, the reconcile pass, and kopf's watch.

Decisions about a job are made in `lifecycle`.
"""
