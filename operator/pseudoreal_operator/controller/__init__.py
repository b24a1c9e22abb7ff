"""The loop over all jobs: what wakes them, the queue, a pass; and kopf's side of it."""
