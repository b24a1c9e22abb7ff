"""Size of the chunks of tokens for the loss, whose logits are as wide as the vocabulary. Pure."""

LOGIT_BYTES = 256 << 20
"""Most bytes of logits in memory at a time, in the dtype of the loss. Several tensors of this size exist at once
(`plan.memory.autograd_memory`). More bytes would mean fewer chunks; each chunk costs a sum over the head's whole
matrix."""


def loss_chunk_limit(vocabulary: int, width: int) -> int:
    """Return the most tokens of a chunk, for logits of `width` bytes each."""
    return max(1, LOGIT_BYTES // (vocabulary * width))


def loss_chunk_length(tokens: int, most: int | None) -> int:
    """Return the tokens of each chunk; the last chunk may be shorter. Chunks are as few as possible, and equal. At
    least 1, even without tokens. `most`: None is no bound."""
    if most is None or tokens <= most:
        return max(1, tokens)
    return -(-tokens // -(-tokens // most))
