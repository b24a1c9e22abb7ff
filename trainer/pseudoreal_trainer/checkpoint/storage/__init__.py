"""Where checkpoints are kept: a file system or an object store, behind one protocol.

What is in them is the business of `checkpoint`.
"""
