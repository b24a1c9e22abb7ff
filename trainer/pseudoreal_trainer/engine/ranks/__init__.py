"""The ranks of a job: processes, process groups and communication between them, CUDA streams, and a trace of each rank.

Their computation is in `engine`.
"""
