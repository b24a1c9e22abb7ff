"""Tokenizers: their files, their training, and the number of text bytes of each token.

`data.prepare` reads texts and writes tokens.
"""
