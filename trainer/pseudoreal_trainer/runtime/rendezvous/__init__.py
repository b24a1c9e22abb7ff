"""Rendezvous of a phase's workers: all connect to worker 0, which authenticates them by the secret of the job and
numbers them. `runtime.in_place` decides when and how often the workers have a rendezvous."""
