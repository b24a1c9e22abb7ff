"""What failures, waits and results mean, and who is at fault. Pure.

What follows from it for the job is decided in `lifecycle`.
"""
