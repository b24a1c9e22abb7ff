"""Reference for the order of samples in docs/checkpoint-format.md: one number at a time, with Python's integers."""

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """Return the output of SplitMix64 after this state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permuted(index: int, count: int, *key: int) -> int:
    assert 0 <= index < count, "the index is inside: from an index outside, the loop may never end"
    half = 4
    while 4**half < count:
        half += 1
    seed = 0
    for number in key:
        seed = splitmix64(seed ^ number)
    while True:
        left, right = divmod(index, 2**half)
        for turn in range(4):
            round_key = splitmix64((seed + turn * 0x9E3779B97F4A7C15) & MASK)
            left, right = right, left ^ splitmix64(right ^ round_key) % 2**half
        index = left * 2**half + right
        if index < count:
            return index
