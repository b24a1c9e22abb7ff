"""Training text: the corpus, the order of its sequences, their assignment to ranks, and a baseline for the loss.

The loop that consumes the sequences is in `training`.
"""
