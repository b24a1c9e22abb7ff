"""Programs: the main process of a pod, a rank, and the command `pseudoreal` with its output.

No other package imports these modules.
"""
