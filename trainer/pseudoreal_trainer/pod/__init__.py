"""Reports of a pod to the operator, its /metrics, and its termination message, which names the rank at fault.

`cli.pod` is the program that supervises the ranks.
"""
