"""The auxiliary loss over the choices of a whole step: in every layout and with any number of micro-batches it equals
the loss of the joined batch. Also the choices of recomputed passes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.model.top_k import TopKExperts
from pseudoreal_trainer.plan.check import PlanError
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.routers import Routers
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import STEPS, Case
from tests.unit.trainer.engine.support.running import Result, run_case, sound, want

FACTOR = 0.2


def _experts(dense: tuple[int, ...] = (1,), **top_k: Any) -> str:
    """Return further fields of a model with experts in balance over whole steps."""
    choice = {"perToken": 3, "size": 6, "auxiliaryLoss": str(FACTOR), "balanceOver": "Step"} | top_k
    return json.dumps({"experts": {"type": "TopK", "count": 8, "topK": choice, "denseLayers": [*dense]}})


PLAIN, EVERYWHERE = _experts(), _experts(dense=())
BIASED = _experts(score="Sigmoid", biasUpdateRate="0.03", sharedExperts=1)
CUT = json.dumps(json.loads(PLAIN) | {"sequenceLength": 8})
"""Sequences with equal chunks for context ranks."""
CUTS = [(1, 16), (4, 4), (8, 2)]
"""Micro-batches and the sequences of each; every entry makes the same batch."""
ONE_RANK = [
    *(Case(drawn=PLAIN, micro_batches=n, sequences=b, keep=k) for n, b in CUTS for k in ("Inputs", "All")),
    Case(drawn=BIASED, order="GPipe", micro_batches=3, keep="All", homes="hD", window=1),
    Case(drawn=PLAIN, order="1F1B", micro_batches=1, stash=True, homes="h"),
    Case(drawn=BIASED, documents=True, clipping="Global"),
    Case(drawn=EVERYWHERE, blocks=2, clipping="PerUnit"),
]
TWO_RANKS = [
    *(
        Case(drawn=PLAIN, data=2, expert_ranks=e, micro_batches=n, sequences=b, keep=k, sharding="Full")
        for e in (1, 2)
        for n, b in CUTS[:2]
        for k in ("Inputs", "All")
    ),
    Case(drawn=BIASED, data=2, sharding="Optimizer", clipping="Global", stash=True),
    Case(drawn=BIASED, data=2, expert_ranks=2, clipping="PerUnit", homes="hD", order="GPipe"),
    *(Case(drawn=EVERYWHERE, pipeline=2, keep=k, clipping="Global") for k in ("Inputs", "All")),
    Case(drawn=EVERYWHERE, pipeline=2, order="GPipe", part="Experts", blocks=1, homes="D"),
    *(Case(drawn=CUT, data=2, context_ranks=2, expert_ranks=e, keep=k) for e in (1, 2) for k in ("Inputs", "All")),
    Case(drawn=CUT, data=2, context_ranks=2, documents=True, clipping="Global", sharding="Full"),
]
MORE_RANKS = [
    # Data ranks have two sequences of a micro-batch, one and one.
    Case(drawn=PLAIN, data=3, sharding="Gradients", clipping="Global"),
    *(Case(drawn=BIASED, pipeline=2, data=2, expert_ranks=e, clipping="Global", sharding="Full") for e in (1, 2)),
    Case(drawn=EVERYWHERE, pipeline=2, data=2, expert_ranks=2, micro_batches=4, keep="All"),
    *(Case(drawn=PLAIN, data=4, expert_ranks=e, sharding="Full", homes="hD") for e in (1, 2, 4)),
    Case(drawn=BIASED, data=4, replicas=2, expert_ranks=2, sharding="Full", clipping="PerUnit"),
    # One of the ranks has no sequence.
    Case(drawn=PLAIN, data=4, expert_ranks=2, micro_batches=1, sequences=3),
]
CASES = [*ONE_RANK, *TWO_RANKS, *MORE_RANKS]
want(CASES, events=True)


def _logits_of(model: Transformer) -> list[Tensor]:
    """Return the list to which the model's routers will append their outputs, [B, T, experts], pass by pass and in each
    pass layer by layer."""
    found: list[Tensor] = []
    blocks: list[Any] = [*model.blocks]
    for block in blocks:
        if block.is_mixture:
            block.router.register_forward_hook(lambda _module, _args, logits: found.append(logits))
    return found


def _loss_of_layer(case: Case, logits: Tensor) -> Tensor:
    """Return the loss of a layer over all tokens of a step: logits [N, experts]."""
    top_k = case.model.top_k
    assert top_k is not None
    scores = logits.softmax(dim=-1) if top_k.score == "Softmax" else logits.sigmoid()
    best = scores.detach().sort(dim=-1, descending=True).indices[:, : top_k.per_token]
    shares = [float((best == expert).sum()) / best.numel() for expert in range(scores.shape[1])]
    probabilities = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    return FACTOR * len(shares) * (torch.tensor(shares, dtype=torch.float64) * probabilities).sum()


def _joined(case: Case) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the cross-entropies and auxiliary losses of all steps, and the final weights, of a plain model with all
    sequences of a step in one batch."""
    model, optimizer = reference.model_and_optimizer(case)
    logits, routers = _logits_of(model), Routers(model)
    layers = sum(map(case.model.has_experts, range(case.layers)))
    losses, auxiliary = [], []
    for step in range(STEPS):
        logits.clear()
        routers.begin()
        optimizer.zero_grad()
        entropy = _cross_entropy(model, case, step)
        of_layers = [torch.cat([each.flatten(0, 1) for each in logits[i::layers]]) for i in range(layers)]
        loss = torch.stack([_loss_of_layer(case, each) for each in of_layers]).sum()
        (entropy + loss).backward()
        reference.clip(model, case)
        optimizer.step()
        routers.take()
        routers.balance()
        losses.append(float(entropy.detach()))
        auxiliary.append(float(loss.detach()))
    return losses, auxiliary, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _cross_entropy(model: nn.Module, case: Case, step: int) -> Tensor:
    pairs = reference._pairs(case, reference.batch_of(case, step).flatten(0, 1))
    sums = [F.cross_entropy(model(i).flatten(0, 1), wanted.flatten(), reduction="sum") for i, wanted in pairs]
    return torch.stack(sums).sum() / reference.targets_of(case, step)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step_balance_loss_is_the_loss_of_the_joined_batch(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    found = sound(engine_results, case)
    losses, auxiliary, weights = _joined(case)
    assert found.losses == pytest.approx(losses, rel=1e-12, abs=1e-12)
    found.assert_weights(weights)
    for result in engine_results[case]:
        sums = [load.auxiliary_loss_sum for load in result.loads if load is not None]
        assert [total / reference.tokens_of(case) for total in sums] == pytest.approx(auxiliary, rel=1e-12)


def test_step_balance_does_not_depend_on_how_a_batch_is_cut(engine_results: dict[Case, list[Result]]) -> None:
    """The result differs from training with the loss of each sequence."""
    first, *others = (engine_results[case][0] for case in ONE_RANK[: 2 * len(CUTS)])
    for other in others:
        assert other.losses == pytest.approx(first.losses, rel=1e-12)
        other.assert_weights(first.weights)
    _, weights = reference.train(replace(ONE_RANK[0], drawn=PLAIN.replace("Step", "Sequence")))
    assert max(float((weights[name] - first.weights[name]).abs().max()) for name in weights) > 1e-6


@pytest.mark.parametrize("case", [*TWO_RANKS, *MORE_RANKS], ids=lambda case: case.name)
def test_choice_counts_are_summed_once_per_layer_and_step(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    """The number of micro-batches does not matter. If no other rank has tokens, there is no sum."""
    for rank, result in enumerate(engine_results[case]):
        here = case.layout.positions(rank // case.data)
        expected = [p for p in here if case.layout.sums_choices(p)] if case.data > 1 else []
        for step in range(STEPS):
            events = [e["args"] for e in result.events if e["name"] == "SumChoices" and e["args"]["step"] == step]
            assert sorted(event["position"] for event in events) == expected


def test_a_plan_with_backward_before_sum_choices_is_rejected(tmp_path: Path) -> None:
    """The job's rules refuse such an order earlier."""
    with pytest.raises(PlanError, match="the choices of its experts in the whole step are not known yet"):
        run_case(Case(drawn=PLAIN, order="1F1B"), Ranks(0, 1, torch.device("cpu")), tmp_path)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Identities of the choices of all passes, and whether the pass made its choice itself."""
    found, made, routes = list[tuple[int, bool]](), list[Any](), TopKExperts.routes

    def noting(
        self: TopKExperts, logits: Tensor, statistics: Any = None, documents: Any = None, decision: Any = None
    ) -> Any:
        result = routes(self, logits, statistics, documents, decision)
        # What lives has an identity of its own.
        made.append(result.decision)
        found.append((id(result.decision), decision is None))
        return result

    monkeypatch.setattr(TopKExperts, "routes", noting)
    return found


TIED_SCORES = Case(options="Mixtral", layers=2, micro_batches=3)


def test_a_recomputed_pass_reuses_the_routing_decision(
    choices: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts tie, and `topk` takes different ones at each call, as rounding might. Forward passes choose once per
    layer and micro-batch; backward passes, from the last layer to the first, use the same objects."""
    calls, topk = [0], Tensor.topk

    def whimsical(scores: Tensor, k: int, dim: int = -1) -> Any:
        calls[0] += 1
        found = topk(scores.roll(calls[0], dims=dim), k, dim=dim)
        return torch.return_types.topk((found.values, (found.indices - calls[0]) % scores.shape[dim]))

    monkeypatch.setattr(Tensor, "topk", whimsical)
    monkeypatch.setattr("pseudoreal_trainer.model.experts.Router.forward", _equal_logits)
    case = TIED_SCORES
    run_case(case, Ranks(0, 1, torch.device("cpu")), tmp_path)
    layers = [list(chunk) for chunk in _chunks(choices[: STEPS * 2 * case.layers * case.micro_batches], 3)]
    for step in _chunks(layers, 2 * case.layers):
        forward, backward = step[: case.layers], step[case.layers :]
        assert all(made for _, made in chain(*forward))
        assert not any(made for _, made in chain(*backward))
        assert [[one for one, _ in layer] for layer in reversed(backward)] == [
            [one for one, _ in layer] for layer in forward
        ]


def _equal_logits(router: nn.Linear, hidden: Tensor) -> Tensor:
    return F.linear(hidden, router.weight * 0)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
