"""The ranks of a job: their processes and groups, the streams of a device, and the trace of what each did.

What they send each other is in `engine`.
"""
