"""Weights of other programs, and checkpoints for them: the formats in which they keep weights, their names, and what
their configurations mean.

Our own format is in `checkpoint`.
"""
