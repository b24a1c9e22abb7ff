"""Balance of experts under many layouts: the bias that follows the tokens of the whole batch, the loss with a gradient,
and the reports of both."""

import json
from pathlib import Path

import pytest
import torch
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.router_statistics import ExpertLoad, change_of_bias
from torch import Tensor

from tests.support.routers import Routers
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import OPTIONS, STEPS, Case, each
from tests.unit.trainer.engine.support.running import Result, run_case, want

BALANCED = "in balance"
EVERYWHERE = json.dumps({"experts": OPTIONS[BALANCED]["experts"] | {"denseLayers": []}})
UNBIASED = [
    Case(options="Mixtral", pipeline=2, data=2, sharding="Gradients"),
    *each(experts=6, prototypes=2, micro_batches=[1, 4], clipping="PerUnit"),
    Case(experts=6, prototypes=3, pipeline=2, data=2, blocks=1, sharding="Full", homes="hD", clipping="Global"),
    Case(experts=4, documents=True, data=2, keep="All", homes="d"),
]
"""Cases without balancing."""
CASES = [
    *each(options=BALANCED, micro_batches=[1, 4], clipping="Global"),
    Case(options=BALANCED, keep="All", order="1F1B", homes="D", window=1),
    *each(options=BALANCED, data=2, sharding=["None", "Full"], homes="hDd", clipping="PerUnit"),
    Case(drawn=EVERYWHERE, pipeline=2, blocks=1, homes="hD", clipping="Global"),
    Case(drawn=EVERYWHERE, pipeline=2, blocks=2, pattern="Segment", clipping="PerUnit", order="Interleaved"),
    Case(options=BALANCED, data=3, sharding="Optimizer", blocks=2, clipping="Global", micro_batches=1),
    Case(drawn=EVERYWHERE, pipeline=2, data=2, sharding="Full", blocks=1, homes="D", clipping="Global"),
    *each(documents=True, options=BALANCED, micro_batches=1, homes="d", clipping="Global"),
    *each(documents=True, options=BALANCED, micro_batches=4, homes="hD", clipping="Global"),
    Case(documents=True, options=BALANCED, data=2, sharding="Full", blocks=2, homes="hDd", clipping="PerUnit"),
    Case(documents=True, drawn=EVERYWHERE, pipeline=2, blocks=1, keep="All", order="1F1B", clipping="Global"),
    *UNBIASED,
]
"""Among the cases are blocks with layers on both pipeline ranks, shards that reach into the padding, and masked
documents. The bias follows all tokens, including tokens without a target, and the auxiliary loss is the mean over whole
sequences."""
want(CASES)


def _reference(case: Case) -> tuple[dict[str, Tensor], list[list[Tensor]], list[tuple[float, float, int]]]:
    """Return the final weights; for each step the tokens of each layer's experts; and for each step the auxiliary loss,
    the mean entropy, and the number of choices that full experts refused."""
    model, optimizer = reference.model_and_optimizer(case)
    routers = Routers(model)
    counts, others = [], []
    for step in range(STEPS):
        reference.set_gradients(model, case, step, routers)
        reference.clip(model, case)
        optimizer.step()
        routers.balance()
        counts.append(routers.counts)
        others.append((routers.auxiliary_loss, routers.entropy, routers.refused))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, counts, others


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_balancing_biases_and_expert_load_equal_the_plain_loop(
    case: Case, engine_results: dict[Case, list[Result]]
) -> None:
    weights, counts, others = _reference(case)
    found = engine_results[case][0]
    for name, expected in weights.items():
        torch.testing.assert_close(found.weights[name], expected, rtol=0, atol=1e-12)
    for load, layers, (loss, entropy, refused) in zip(found.loads, counts, others, strict=True):
        assert load is not None
        shares = [float(layer.max() / layer.double().mean()) for layer in layers]
        assert (load.largest, load.mean) == pytest.approx((max(shares), sum(shares) / len(shares)), rel=1e-14)
        assert load.idle == pytest.approx(sum(int((layer == 0).sum()) for layer in layers) / sum(map(len, layers)))
        assert load.auxiliary_loss_sum == pytest.approx(loss, rel=1e-12)
        assert load.entropy == pytest.approx(entropy, rel=1e-12)
        assert load.dropped == pytest.approx(refused / sum(int(layer.sum()) for layer in layers), abs=1e-15)
    assert all(result.loads == found.loads for result in engine_results[case])


@pytest.mark.parametrize("case", [case for case in CASES if case not in UNBIASED], ids=lambda case: case.name)
def test_a_balancing_bias_changes_and_has_no_moments(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    found = engine_results[case][0]
    biases = [name for name in found.weights if name.endswith("balancing_bias")]
    assert len(biases) == sum(name.endswith("router.weight") for name in found.weights)
    for name in biases:
        assert not found.first_moments[name].any()
        assert found.weights[name].any()
        assert float(found.weights[name].sum()) == pytest.approx(0, abs=1e-14)


def test_with_global_clipping_the_expert_load_comes_with_the_one_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits for a second agreement."""
    monkeypatch.delattr(ReductionThread, "request_final_agreement")
    case = CASES[0]
    assert case.clipping == "Global"
    assert all(run_case(case, Ranks(0, 1, torch.device("cpu")), tmp_path).loads)


def test_change_of_bias_moves_each_bias_towards_the_mean_load() -> None:
    """Five experts with a mean of 4: two have more, two have less, one has the mean. Then three against one, with a
    mean that is subtracted."""
    found = change_of_bias(torch.tensor([9.0, 4.0, 0.0, 5.0, 2.0]), 0.5)
    assert found.tolist() == [-0.5, 0.0, 0.5, -0.5, 0.5]
    assert change_of_bias(torch.tensor([9.0, 1.0, 1.0, 1.0]), 1.0).tolist() == [-1.5, 0.5, 0.5, 0.5]
    # In float32 the mean would be that of the first.
    assert change_of_bias(torch.tensor([2.0**24 - 1, 2.0**24 - 1, 2.0**24 - 2]), 3.0).tolist() == [-2.0, -2.0, 4.0]
    assert not change_of_bias(torch.full((6,), 7.0), 1.0).any()


def test_expert_load_reports_the_distribution_of_tokens() -> None:
    """Two layers of three experts: their choices, refused choices, the entropy, and the auxiliary loss."""
    found = ExpertLoad.of([6.0, 0.0, 0.0, 2.0, 3.0, 0.25, 2.0, 2.0, 2.0, 1.0, 1.5, 0.5], layers=2)
    assert found == ExpertLoad(
        largest=3.0, mean=2.0, idle=2 / 6, dropped=3 / 12, entropy=4.5 / 12, auxiliary_loss_sum=0.75
    )
    assert ExpertLoad.of([], layers=0) is None
