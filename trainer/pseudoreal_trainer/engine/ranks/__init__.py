"""The ranks of a job: their processes and groups, sums over a group, the streams of a device, and a trace of each rank.

What they send each other is in `engine`.
"""
