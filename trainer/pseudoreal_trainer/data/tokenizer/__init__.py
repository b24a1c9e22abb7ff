"""Tokenizers: their files, how they are trained, and how many bytes of text each token stands for.

Where the text comes from, and where its tokens go, is decided where files are prepared.
"""
