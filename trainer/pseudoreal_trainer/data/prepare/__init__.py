"""Text to native token files: reading of inputs, tokens, shards, and the processes that make them.

Reading the files for training is in `data` and `data.tokens`.
"""
