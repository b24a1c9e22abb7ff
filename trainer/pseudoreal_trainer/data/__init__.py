"""The text: the corpus, the order of its sequences, and a baseline for the loss.

Which rank takes which sequences is decided in `training`.
"""
