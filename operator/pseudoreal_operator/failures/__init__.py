"""Interpretation of failures, waits and results, and of the pod at fault. Pure.

Consequences for the job are decided in `lifecycle`.
"""
