"""How a micro-batch's tokens are cut for the loss, whose logits are as wide as the vocabulary. Pure."""

LOGIT_BYTES = 256 << 20
"""Most bytes of the logits that are in memory at a time, in the type of the loss. Some tensors of this size live beside
each other (`forecast.memory.graphs`). With more, chunks are fewer: a chunk costs a sum over the head's whole matrix."""


def most_tokens(vocabulary: int, width: int) -> int:
    """Most tokens of a chunk, for logits of `width` bytes each."""
    return max(1, LOGIT_BYTES // (vocabulary * width))


def chunk_length(tokens: int, most: int | None) -> int:
    """Tokens of each chunk but the last, which may be shorter: as few chunks as there can be, and those alike. At least
    1, even of no tokens. `most`: None is no bound."""
    if most is None or tokens <= most:
        return max(1, tokens)
    return -(-tokens // -(-tokens // most))
