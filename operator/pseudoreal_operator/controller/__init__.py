"""kopf's side: a loop of passes for each job, and what wakes it."""
