"""Attention within documents: packed rows compute the same as each document in its own row."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.attention import documents_of
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.model.rotary import rotary
from pseudoreal_trainer.model.transformer import build_model
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor
from torch.nn import functional as F

from tests.unit.trainer.data.support.cut import cut

END, LENGTH = 0, 24
rows = st.integers(1, 9).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 3), min_size=width + 1, max_size=width + 1), max_size=4).map(
        lambda found: torch.tensor(found, dtype=torch.int64).view(len(found), width + 1)
    )
)


@given(rows)
def test_documents_are_those_that_a_person_cuts(tokens: Tensor) -> None:
    found = documents_of(tokens, END, tokens)
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


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_are_separate_rows(name: str) -> None:
    """Compare loss and gradients in float64."""
    model, tokens = build_model(MODELS[name], Sharing(blocks=2), 5, torch.float64), _rows()
    separate = torch.zeros((), dtype=torch.float64)
    for row in tokens.tolist():
        for part in cut(row, END):
            wanted = [target for _, target in part if target is not None]
            logits = model(torch.tensor([[token for token, _ in part]]))[0, : len(wanted)]
            separate = separate + F.cross_entropy(logits, torch.tensor(wanted).long(), reduction="sum")
    expected = torch.autograd.grad(separate, list(model.parameters()))
    targets = tokens[:, 1:].masked_fill(tokens[:, :-1] == END, -100)
    logits = model(tokens[:, :-1], documents_of(tokens, END, tokens))
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

    def block(hidden: Tensor, rotation: tuple[Tensor, Tensor], *_: object) -> Tensor:
        given.append(rotation)
        return hidden

    modules._run_block[False] = block
    modules.block(hidden, 0, documents=documents_of(tokens, END, tokens))
    for found, table in zip(given[0], rotary(spec, LENGTH, hidden), strict=True):
        expected = [[table[place] for part in cut(row, END) for place in range(len(part))] for row in tokens.tolist()]
        assert torch.equal(found[:, 0], torch.stack([torch.stack(row) for row in expected]))


def test_nothing_is_compiled_anew_for_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
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
        modules.block(hidden, 0, documents=documents_of(rows, END, rows))
        compiled.append(len(graphs))
    torch.compiler.reset()
    assert compiled == [compiled[0]] * 4
    assert compiled[0] > 0


def test_masks_change_what_is_computed() -> None:
    """Otherwise comparing the masked models would prove nothing."""
    model, tokens = build_model(MODELS["plain"], Sharing(blocks=2), 5, torch.float64), _rows()
    within, across = model(tokens[:, :-1], documents_of(tokens, END, tokens)), model(tokens[:, :-1])
    difference = (within - across).abs().amax(dim=2)
    assert difference[0].max() < 1e-13, "the row is one document, so its mask changes nothing"
    assert difference[1, :10].max() < 1e-13
    assert difference[1, 10:].min() > 1e-6


def test_a_rank_without_sequences_has_a_pass_of_none() -> None:
    """All parameters still have gradients, which are zero."""
    model, tokens = build_model(MODELS["windows"], Sharing(blocks=2), 5, torch.float64), _rows()[:0]
    logits = model(tokens[:, :-1], documents_of(tokens, END, tokens))
    assert logits.shape == (0, LENGTH, 256)
    assert all(not gradient.any() for gradient in torch.autograd.grad(logits.sum(), list(model.parameters())))
