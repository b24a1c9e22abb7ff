"""Chunks of tokens for the loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.plan.sizes import Device, logit_bytes, loss_chunk_length, loss_chunk_limit


@given(st.integers(0, 10_000), st.integers(1, 3_000))
def test_loss_chunks_are_as_few_as_possible_and_equal(tokens: int, most: int) -> None:
    length = loss_chunk_length(tokens, most)
    lengths = [min(length, tokens - begin) for begin in range(0, tokens, length)]
    assert sum(lengths) == tokens
    assert max(lengths, default=1) <= most
    assert len(lengths) == -(-tokens // most)
    # One less a chunk would make another chunk.
    assert not lengths or length == 1 or -(-tokens // (length - 1)) > len(lengths)


def test_loss_has_one_chunk_without_a_bound() -> None:
    assert [loss_chunk_length(tokens, None) for tokens in (0, 1, 12_345)] == [1, 1, 12_345]


@pytest.mark.parametrize(
    ("vocabulary", "width", "tokens"), [(256, 4, 262_144), (50_304, 4, 1334), (128_256, 4, 523), (10**9, 4, 1)]
)
def test_logits_of_a_loss_chunk_fit_the_bound(vocabulary: int, width: int, tokens: int) -> None:
    assert loss_chunk_limit(vocabulary, width, 2**28) == tokens
    assert tokens == 1 or tokens * vocabulary * width <= 2**28


@pytest.mark.parametrize(
    ("device", "memory", "most"),
    [
        # GiB of a GPU as its driver reports them, with a part that the driver keeps: H200, H100, A100, L4, T4.
        ("accelerator", 139.8 * 2**30, 2 << 30),
        ("accelerator", 79.1 * 2**30, 1 << 30),
        ("accelerator", 39.4 * 2**30, 512 << 20),
        ("accelerator", 22.0 * 2**30, 256 << 20),
        ("accelerator", 14.6 * 2**30, 128 << 20),
        ("accelerator", None, 256 << 20),
        ("accelerator", 2**20, 16 << 20),
        ("cpu", None, 256 << 20),
        ("cpu", 2**40, 256 << 20),
    ],
)
def test_logits_of_a_loss_chunk_take_a_share_of_the_devices_memory(
    device: Device, memory: float | None, most: int
) -> None:
    """The share is rounded down to a power of two, so that GPUs of one kind have equal chunks although their memory
    differs by a few bytes."""
    assert logit_bytes(device, None if memory is None else int(memory)) == most
    if memory is not None and device == "accelerator" and most > 16 << 20:
        assert memory / 128 < most <= memory / 64
