"""The children of a job as manifests. Pure.

Which of them are wanted is decided in `lifecycle`.
"""
