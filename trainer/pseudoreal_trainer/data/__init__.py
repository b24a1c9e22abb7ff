"""Training text: the corpus, the order of its sequences, and a baseline for the loss.

The assignment of sequences to ranks is in `training`.
"""
