"""Where checkpoints are stored: a file system or an object store, with one protocol for both.

The contents are defined in `checkpoint`.
"""
