"""Storage of checkpoints and token files: a file system or an object store, with one protocol for both.

The contents are defined in `checkpoint` and `data`.
"""
