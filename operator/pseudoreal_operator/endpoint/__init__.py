"""The endpoint to which the pods report while they run: who may, and how often.

What reports mean is decided in `observe` and `failures`.
"""
