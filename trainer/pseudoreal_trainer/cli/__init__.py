"""The programs that are started: a pod, a rank, and the command `pseudoreal` with what it shows.

Nothing imports them.
"""
