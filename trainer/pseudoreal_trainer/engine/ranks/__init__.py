"""The ranks of a job: their processes and groups, what passes between them, the streams of a device, and a trace of
each rank.

What they compute is in `engine`.
"""
