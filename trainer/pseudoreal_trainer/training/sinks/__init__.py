"""Programs besides metrics.jsonl that take the figures of each step, each in a file of its own.

What a figure is, and when there is one, is decided in `training`.
"""
