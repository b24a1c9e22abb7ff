"""Parts of sequences for context parallelism. The oracle is one mask over whole sequences, built pair by pair."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.model.context import (
    ContextCut,
    SequenceParts,
    _mask,
    attend_in_parts,
    spans_of,
    sub_ranges,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

RANKS = [2, 3, 4]
ROWS, HEADS, WIDTH = 2, 4, 6


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_are_joined_to_the_whole_again(ranks: int) -> None:
    whole = torch.arange(ROWS * 4 * ranks * 5).view(ROWS, 4 * ranks, 5)
    cuts = [ContextCut(ranks, rank, 4 * ranks) for rank in range(ranks)]
    parts = torch.stack([cut.own(whole) for cut in cuts])
    for cut in cuts:
        assert torch.equal(cut.joined(parts), whole)
        assert torch.equal(cut.parts(whole), parts)


def test_each_token_has_one_rank_and_one_place_there() -> None:
    cuts = [ContextCut(3, rank, 12) for rank in range(3)]
    for token in range(12):
        (found,) = [(cut, index) for cut in cuts if (index := cut.index_of(token)) is not None]
        assert found[0].own(torch.arange(12)[None])[0, found[1]] == token


def test_gpus_get_a_description_of_the_mask_unless_the_window_is_shorter() -> None:
    """Flash attention takes no mask in memory."""
    meta = torch.device("meta")
    for window in (None, 8, 9):
        assert isinstance(_mask(4, 8, window, meta), CausalBias)
    assert not isinstance(_mask(4, 8, 7, meta), CausalBias)
    assert _mask(8, 8, None, meta) is None


@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_attend_to_equally_many_tokens(ranks: int) -> None:
    length = 4 * ranks
    pairs = [
        sum(token + 1 for chunk in ContextCut(ranks, rank, length).chunks for token in chunk) for rank in range(ranks)
    ]
    assert len(set(pairs)) == 1
    assert sum(pairs) == length * (length + 1) // 2


@st.composite
def _lengths(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Draw a number of ranks, and the lengths of all documents of one sequence."""
    ranks = draw(st.sampled_from(RANKS))
    length = 2 * ranks * draw(st.integers(1, 4))
    ends = sorted({*draw(st.lists(st.integers(1, length - 1), max_size=6)), length})
    return ranks, [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@given(_lengths())
def test_spans_have_each_token_once_with_all_tokens_before_it_in_its_document(drawn: tuple[int, list[int]]) -> None:
    ranks, lengths = drawn
    starts = [begin for begin, n in zip(accumulate(lengths, initial=0), lengths, strict=False) for _ in range(n)]
    for rank in range(ranks):
        cut = ContextCut(ranks, rank, sum(lengths))
        found = dict[int, tuple[int, int]]()
        for span in spans_of(cut.chunks, lengths):
            assert len(span.queries) <= len(span.keys)
            ends = range(span.keys.stop - len(span.queries), span.keys.stop)
            found |= {query: (span.keys.start, end) for query, end in zip(span.queries, ends, strict=True)}
        tokens = [token for chunk in cut.chunks for token in chunk]
        assert found == {index: (starts[token], token) for index, token in enumerate(tokens)}


def _whole(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, window: int | None) -> Tensor:
    """Return attention over whole sequences, [B, T, heads, w], under a mask of all pairs of tokens. `starts`: first
    token of each token's document, [B, T]."""
    places = torch.arange(query.shape[1])
    seen = (places[:, None] >= places) & (starts[:, :, None] <= places)
    if window is not None:
        seen &= places[:, None] - places < window
    scores = torch.einsum("bqhw,bkhw->bhqk", query, key.repeat_interleave(query.shape[2] // key.shape[2], dim=2))
    weights = (scores / WIDTH**0.5).masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhw->bqhw", weights, value.repeat_interleave(query.shape[2] // key.shape[2], dim=2))


def _gather_from(cut: ContextCut, others: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a gather with the parts of the other ranks from `others`. Gradients reach all parts."""
    return lambda part: cut.joined(torch.stack([*others[: cut.rank], part, *others[cut.rank + 1 :]]))


DOCUMENTS = {
    "whole sequences": [[24], [24]],
    "documents": [[1, 5, 18], [24]],
    "many documents": [[1] * 24, [3, 3, 6, 1, 11]],
}


@pytest.mark.parametrize("window", [None, 1, 4, 30])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", RANKS)
def test_attention_in_parts_equals_attention_over_whole_sequences(
    ranks: int, key_heads: int, lengths: list[list[int]], window: int | None
) -> None:
    draw = torch.Generator().manual_seed(5)
    shapes = ((ROWS, 24, heads, WIDTH) for heads in (HEADS, key_heads, key_heads))
    query, key, value = (torch.randn(s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes)
    starts = torch.stack(
        [
            torch.tensor([b for b, n in zip(accumulate(row, initial=0), row, strict=False) for _ in range(n)])
            for row in lengths
        ]
    )
    expected = _whole(query, key, value, starts, window)
    cuts = [ContextCut(ranks, rank, 24) for rank in range(ranks)]
    both = torch.cat([key, value], dim=2)
    mixed = []
    for cut in cuts:
        spans = tuple(spans_of(cut.chunks, row) for row in lengths)
        own, is_whole = [other.own(both) for other in cuts], lengths[0] == [24]
        gather = _gather_from(cut, own)
        parts = SequenceParts(24, spans[:1] if is_whole else spans, cut.own(starts), gather, window=window)
        mixed.append(attend_in_parts(parts, cut.own(query), gather(own[cut.rank])))
    found = cuts[0].joined(torch.stack(mixed))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    direction = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    of_parts, of_whole = (torch.autograd.grad(each, (query, key, value), direction) for each in (found, expected))
    for here, there in zip(of_parts, of_whole, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-13)


def test_attention_of_a_part_without_documents_is_torch_s_causal_attention_where_it_can_be() -> None:
    """The first chunk of the first rank attends to itself alone: no mask is needed."""
    cut = ContextCut(2, 0, 8)
    features = torch.randn(1, 8, 1, WIDTH, dtype=torch.float64)
    both = torch.cat([features] * 2, dim=2)
    parts = SequenceParts(8, (spans_of(cut.chunks, [8]),), torch.arange(4), lambda _: both)
    expected = F.scaled_dot_product_attention(*(features[:, :2].transpose(1, 2),) * 3, is_causal=True).transpose(1, 2)
    found = attend_in_parts(parts, cut.own(features), both)
    torch.testing.assert_close(found[:, :2], expected, rtol=0, atol=1e-15)


@given(_lengths(), st.data())
def test_a_part_of_a_part_has_the_spans_of_its_tokens(drawn: tuple[int, list[int]], data: st.DataObject) -> None:
    ranks, lengths = drawn
    cut = ContextCut(ranks, data.draw(st.integers(0, ranks - 1)), sum(lengths))
    tokens = [token for chunk in cut.chunks for token in chunk]
    begin = data.draw(st.integers(0, len(tokens)))
    end = data.draw(st.integers(begin, len(tokens)))
    ranges = sub_ranges(cut.chunks, begin, end)
    assert [token for own in ranges for token in own] == tokens[begin:end]
    starts = [begin for begin, n in zip(accumulate(lengths, initial=0), lengths, strict=False) for _ in range(n)]
    found = [
        (query, token, span.keys.start)
        for span in spans_of(ranges, lengths)
        for query, token in zip(span.queries, span.keys[-len(span.queries) :], strict=True)
    ]
    assert found == [(query, token, starts[token]) for query, token in enumerate(tokens[begin:end])]
