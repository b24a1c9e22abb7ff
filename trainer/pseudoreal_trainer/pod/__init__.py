"""Reports of a pod to the operator, its /metrics, and its termination message with the rank at fault.

`cli.pod` is the program supervising the ranks.
"""
