"""Rendezvous of a phase's workers: all workers connect to worker 0. Worker 0 authenticates them by the secret of the
job, and gives each a number. `runtime.in_place` decides when and how often the workers have a rendezvous."""
