"""Attention within documents: packed rows compute the same as each document in its own row."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model import attention
from pseudoreal_trainer.model.attention import find_documents
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.model.reference import build_model
from pseudoreal_trainer.model.rotary import rotary
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import varlen

from tests.unit.trainer.data.support.cut import cut

END, LENGTH = 0, 24
rows = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width + 1, max_size=width + 1), max_size=4).map(
        lambda found: torch.tensor(found, dtype=torch.int64).view(len(found), width + 1)
    )
)


@given(rows)
def test_documents_are_those_that_a_person_cuts(tokens: Tensor) -> None:
    found = find_documents(tokens, END, tokens)
    expected = [cut(row, END) for row in tokens.tolist()]
    assert found.lengths == tuple(tuple(map(len, parts)) for parts in expected)
    assert found.positions.shape == (len(tokens), tokens.shape[1] - 1)
    assert found.positions.tolist() == [[place for part in parts for place in range(len(part))] for parts in expected]


def _model(**attention: Any) -> Model:
    fields: dict[str, Any] = {"layers": 2, "hiddenSize": 32, "sequenceLength": LENGTH, "feedForward": {"size": 48}}
    return Model.model_validate(fields | {"attention": {"heads": 4} | attention})


def _rows() -> Tensor:
    """Return rows with documents of 1 to 24 tokens. Some documents are cut by the end of a row; one end token is the
    last input, another the last target."""
    tokens = torch.randint(1, 256, (5, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    for row, ends in enumerate(([], [9], [0, 1, 12, 13, 22], [23], [3, 24])):
        tokens[row, ends] = END
    return tokens


MODELS = {
    "plain": _model(),
    "grouped": _model(keyValueHeads=2, headSize=6, queryKeyNorm="PerHead"),
    "windows": _model(window={"size": 5}),
    "a window in one layer": _model(keyValueHeads=1, window={"size": 8, "layers": [1]}),
}


@dataclass(frozen=True)
class Call:
    """Arguments of one call of attention with variable lengths."""

    bounds: list[int]
    longest: int
    window_size: tuple[int, int]
    enable_gqa: bool


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Replaces torch's attention with variable lengths, which needs a GPU, by one that computes each row of scores by
    itself. Returns the list to which each call is added."""
    calls: list[Call] = []

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        bounds = cu_seq_q.tolist()
        assert (cu_seq_q.dtype, cu_seq_k.tolist(), max_k) == (torch.int32, bounds, max_q)
        assert bounds[-1] == len(query), "every token is in a document"
        calls.append(Call(bounds, max_q, window_size, enable_gqa))
        before, rows = window_size[0], []
        assert window_size[1] == 0, "no token attends to later tokens"
        group = query.shape[1] // key.shape[1]
        for start, stop in pairwise(bounds):
            assert stop - start <= max_q, "max_q bounds the kernel's grid: later tokens would not be computed"
            for token in range(start, stop):
                first = start if before < 0 else max(start, token - before)
                k, v = (each[first : token + 1].repeat_interleave(group, dim=1) for each in (key, value))
                scores = torch.einsum("hw,thw->ht", query[token], k) / query.shape[2] ** 0.5
                rows.append(torch.einsum("ht,thw->hw", scores.softmax(dim=1), v))
        return torch.stack(rows)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "varlen_obstacle", lambda *_: None)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_are_separate_rows(name: str) -> None:
    """Compare loss and gradients in float64."""
    assert_packed_rows_are_separate_rows(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_one_call_for_all_documents_computes_separate_rows(name: str, varlen_calls: list[Call]) -> None:
    """The separate rows have no documents, so they are computed without the calls that are tested."""
    assert_packed_rows_are_separate_rows(MODELS[name])
    # Twelve documents in 120 tokens; sixteen bounds are passed. The longest document has 24 tokens.
    starts = [0, 24, 34, 48, 49, 50, 61, 62, 71, 72, 96, 100]
    assert [call.bounds for call in varlen_calls] == [starts + [120] * 5] * 2, "one call for each layer"
    assert {call.longest for call in varlen_calls} == {LENGTH}, "32, a power of two, is more than a whole row"
    windows = {"windows": [4, 4], "a window in one layer": [-1, 7]}.get(name, [-1, -1])
    assert [call.window_size for call in varlen_calls] == [(before, 0) for before in windows]
    assert {call.enable_gqa for call in varlen_calls} == {name in ("grouped", "a window in one layer")}


def test_no_window_is_passed_if_all_documents_fit_in_it(varlen_calls: list[Call]) -> None:
    """Flash attention without a window is faster."""
    model, tokens = build_model(MODELS["windows"], Sharing(blocks=2), 5, torch.float64), _rows()[2:3]
    tokens[0, ::4] = END
    model(tokens[:, :-1], find_documents(tokens, END, tokens))
    assert {(call.longest, call.window_size) for call in varlen_calls} == {(4, (-1, 0))}


@given(st.lists(rows, min_size=1, max_size=20))
def test_shapes_of_calls_for_all_documents_are_few(found: list[Tensor]) -> None:
    """Rows of up to 9 tokens, up to 4 of them: lengths 1, 2, 4, 8 and the rows' own, and 1 to 64 documents."""
    for tokens in found:
        documents = find_documents(tokens, END, tokens)
        lengths = [length for row in documents.lengths for length in row]
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        bounds = documents.bounds.tolist()
        assert bounds[: len(starts)] == starts
        assert set(bounds[len(starts) :]) == {sum(lengths)}
        assert len(bounds) - 1 in (1, 2, 4, 8, 16, 32, 64)
        assert len(bounds) - 1 < 2 * max(1, len(lengths))
        assert documents.longest in (1, 2, 4, 8, tokens.shape[1] - 1)
        assert max(lengths, default=1) <= documents.longest < 2 * max(lengths, default=1)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU without memory, whose flash attention takes bfloat16 and heads of at most 256 features."""

    def can_use(params: Any) -> bool:
        assert params.query.requires_grad, "the backward pass takes fewer heads than the forward pass"
        query: Tensor = params.query
        return query.dtype == torch.bfloat16 and query.shape[-1] <= 256

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda query, *_: SimpleNamespace(query=query))
    attention.varlen_obstacle.cache_clear()
    with FakeTensorMode():
        yield
    attention.varlen_obstacle.cache_clear()


@pytest.mark.parametrize(
    ("device", "dtype", "width", "says"),
    [
        ("cuda", torch.bfloat16, 64, None),
        ("cuda", torch.bfloat16, 256, None),
        ("cuda", torch.bfloat16, 20, "needs heads whose width is a multiple of 8, and these have 20 features"),
        ("cuda", torch.bfloat16, 264, "does not take heads of 264 features in torch.bfloat16 on this GPU"),
        ("cuda", torch.float32, 64, "does not take heads of 64 features in torch.float32 on this GPU"),
        ("cpu", torch.bfloat16, 64, "for CUDA devices, not for cpu"),
    ],
)
@pytest.mark.usefixtures("flash_attention")
def test_documents_need_a_call_each_where_flash_attention_does_not_take_them(
    device: str, dtype: torch.dtype, width: int, says: str | None
) -> None:
    found = attention.varlen_obstacle(torch.device(device), dtype, 4, 2, width)
    assert found is says is None or (found is not None and says is not None and says in found)


@pytest.mark.usefixtures("flash_attention")
def test_torch_whose_variable_lengths_take_no_groups_needs_a_call_for_each_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, *, window_size: None)  # noqa: ARG005
    found = attention.varlen_obstacle(torch.device("cuda"), torch.bfloat16, 4, 2, 64)
    assert found == f"attention with variable lengths in torch {torch.__version__} has no enable_gqa"
    assert attention.varlen_obstacle(torch.device("cuda"), torch.bfloat16, 4, 4, 64) is None


def assert_packed_rows_are_separate_rows(spec: Model) -> None:
    model, tokens = build_model(spec, Sharing(blocks=2), 5, torch.float64), _rows()
    separate = torch.zeros((), dtype=torch.float64)
    for row in tokens.tolist():
        for part in cut(row, END):
            wanted = [target for _, target in part if target is not None]
            logits = model(torch.tensor([[token for token, _ in part]]))[0, : len(wanted)]
            separate = separate + F.cross_entropy(logits, torch.tensor(wanted).long(), reduction="sum")
    expected = torch.autograd.grad(separate, list(model.parameters()))
    targets = tokens[:, 1:].masked_fill(tokens[:, :-1] == END, -100)
    logits = model(tokens[:, :-1], find_documents(tokens, END, tokens))
    packed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert packed.item() == pytest.approx(separate.item(), rel=1e-14)
    for found, gradient in zip(torch.autograd.grad(packed, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13 * max(1.0, float(gradient.abs().max())))


@pytest.mark.processor
def test_positions_begin_anew_in_each_document() -> None:
    """In the loss, wrong positions would only show as rounding, so the rotation is compared directly."""
    spec, tokens = MODELS["grouped"], _rows()
    modules = Modules(spec, units_of(spec, Sharing(blocks=2)), torch.float64, compiled=False)
    hidden, given = torch.zeros(5, LENGTH, 32, dtype=torch.float64), []

    def block(hidden: Tensor, rotation: tuple[Tensor, Tensor], *_: object, **__: object) -> Tensor:
        given.append(rotation)
        return hidden

    modules._run_block[False] = block
    modules.block(hidden, 0, scope=find_documents(tokens, END, tokens))
    for found, table in zip(given[0], rotary(spec, LENGTH, hidden), strict=True):
        expected = [[table[place] for part in cut(row, END) for place in range(len(part))] for row in tokens.tolist()]
        assert torch.equal(found, torch.stack([torch.stack(row) for row in expected]))


def test_other_documents_cause_no_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch has other documents; after eight recompilations torch would run uncompiled."""
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    spec, tokens = MODELS["windows"], _rows()
    modules = Modules(spec, units_of(spec, Sharing(blocks=2)), torch.float64, compiled=True)
    modules.of(1).bind(torch.randn(modules.of(1).numel, dtype=torch.float64))
    hidden, compiled = torch.randn(2, LENGTH, 32, dtype=torch.float64), []
    for rows in (tokens[:2], tokens[1:3], tokens[2:4], tokens[3:]):
        modules.block(hidden, 0, scope=find_documents(rows, END, rows))
        compiled.append(len(graphs))
    torch.compiler.reset()
    assert compiled == [compiled[0]] * 4
    assert compiled[0] > 0


def test_masks_change_what_is_computed() -> None:
    """Otherwise comparing the masked models would prove nothing."""
    model, tokens = build_model(MODELS["plain"], Sharing(blocks=2), 5, torch.float64), _rows()
    within, across = model(tokens[:, :-1], find_documents(tokens, END, tokens)), model(tokens[:, :-1])
    difference = (within - across).abs().amax(dim=2)
    assert difference[0].max() < 1e-13, "the row is one document, so its mask changes nothing"
    assert difference[1, :10].max() < 1e-13
    assert difference[1, 10:].min() > 1e-6


def test_a_rank_without_sequences_has_a_pass_of_none() -> None:
    """All parameters still have gradients, which are zero."""
    model, tokens = build_model(MODELS["windows"], Sharing(blocks=2), 5, torch.float64), _rows()[:0]
    logits = model(tokens[:, :-1], find_documents(tokens, END, tokens))
    assert logits.shape == (0, LENGTH, 256)
    assert all(not gradient.any() for gradient in torch.autograd.grad(logits.sum(), list(model.parameters())))
