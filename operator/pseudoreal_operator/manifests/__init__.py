"""The children of a job as manifests. Pure.

`lifecycle` decides which children are wanted.
"""
