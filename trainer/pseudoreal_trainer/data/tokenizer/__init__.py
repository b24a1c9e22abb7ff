"""Tokenizers: their files, their training, and the number of text bytes of each token.

Where text comes from and where tokens go is decided in `prepare`.
"""
