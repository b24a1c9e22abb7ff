"""Text to native token files: reading of inputs, tokens, shards, and the processes that make them.

How the files are read when a model trains is decided in `data` and `data.tokens`.
"""
