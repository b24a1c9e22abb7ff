"""Checkpoints for other programs: the formats in which they keep weights, and the names that they give them.

Our own format is in `checkpoint`.
"""
