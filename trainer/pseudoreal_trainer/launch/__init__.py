"""Start of a pod's ranks, rendezvous with the other pods, and restarts of the ranks in place. Only the process from
which torchrun is forked imports torch."""
