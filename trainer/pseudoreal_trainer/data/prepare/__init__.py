"""Preparation of native token files from text: input formats, tokenization, shards, and the worker processes.

For training, `data` and `data.tokens` read the files.
"""
