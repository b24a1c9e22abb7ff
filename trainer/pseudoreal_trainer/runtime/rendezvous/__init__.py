"""Rendezvous of a phase's workers: all workers connect to worker 0. Worker 0 authenticates the workers by the secret of
the job, and gives each worker a number. `runtime.in_place` decides when the workers have a rendezvous."""
