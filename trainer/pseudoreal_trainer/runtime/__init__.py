"""A pod while it runs: start of its ranks, restarts of the ranks in place, their heartbeats, the pod's reports to the
operator, its /metrics, and its termination message with the rank at fault.

`cli.pod` is the program supervising the ranks. Only the process from which torchrun is forked imports torch.
"""
