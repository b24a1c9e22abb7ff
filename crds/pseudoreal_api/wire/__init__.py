"""What operator and pods say to each other while a job runs: reports, termination messages, the contract's number.

What a pod is told when it starts is in `resolved`.
"""
