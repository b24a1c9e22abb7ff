"""Shards of units whose number of parameters is not divisible by the number of ranks.

The bytes that a rank really keeps equal the table of the ZeRO paper (Rajbhandari et al., arXiv 1910.02054, figure 1;
here gradients are float32, too) and the plan's prediction, and padding has no effect.
"""

import json

import pytest
import torch
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.memory.tiers import unit_state
from pseudoreal_trainer.plan.sizes import Sizes, compute_bytes, master_bytes
from pseudoreal_trainer.plan.units import units_of

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import EIGHT_IN_WIDE, SEQUENCES_OF_A_MICRO_BATCH, WIDE, Case, each
from tests.unit.trainer.engine.support.running import Result, want
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

N = 3
"""Divides no unit: every last shard is padded."""
VECTOR = 16
"""Shards are a multiple of this number of elements."""
WEIGHTS, MOMENTS, GRADIENTS = 4, 8, 4
"""Bytes per parameter in float32."""

IN_PAGES = json.dumps({"hiddenSize": 36, "attention": {"heads": 2}})
"""A block's matrices take 6,912 elements: Muon keeps no second moments of 6,144."""

ZERO = {
    # sharding -> which of weights, moments and gradients are split
    "None": (False, False, False),
    "Optimizer": (False, True, False),
    "Gradients": (False, True, True),
    "Full": (True, True, True),
}
SHARDED = [Case(data=N, sharding=sharding, precision="float32", micro_batches=1) for sharding in ZERO]
OTHERS = [
    *(Case(data=N, sharding=s, precision="bfloat16", homes="dhD", micro_batches=1) for s in ZERO),
    *(Case(homes=homes, clipping="Global", precision="bfloat16", micro_batches=1) for homes in "dhD"),
    Case(homes="D", clipping="PerUnit", precision="float32", micro_batches=1),
    Case(homes="hd", clipping="Global", speculates=True, precision="bfloat16", micro_batches=1),
    Case(data=N, sharding="Full", options="in balance", precision="bfloat16", micro_batches=1),
    *(Case(homes=homes, moments="BFloat16", precision="bfloat16", micro_batches=1) for homes in "dhD"),
    Case(data=N, sharding="Full", homes="dhD", moments="BFloat16", precision="float32", micro_batches=1),
    Case(homes="hd", clipping="Global", speculates=True, moments="BFloat16", precision="bfloat16", micro_batches=1),
    *(Case(homes=homes, moments="Float8", drawn=WIDE, precision="bfloat16", micro_batches=1) for homes in "dhD"),
    Case(data=N, sharding="Full", homes="dhD", moments="Float8", drawn=WIDE, precision="float32", micro_batches=1),
    Case(homes="hd", clipping="Global", speculates=True, moments="Float8", drawn=EIGHT_IN_WIDE, precision="bfloat16"),
    *(Case(homes=homes, gradients="BFloat16", precision="bfloat16", clipping="Global") for homes in "dhD"),
    Case(data=N, sharding="Full", homes="dhD", gradients="BFloat16", precision="float32", clipping="Global"),
    *each(algorithm="Muon", homes=["d", "h", "D"], precision=["float32", "bfloat16"], micro_batches=1, drawn=IN_PAGES),
    Case(algorithm="Muon", homes="h", speculates=True, clipping="Global", options="in balance", micro_batches=1),
]
PADDED = [
    *(Case(data=N, sharding=sharding, clipping="Global") for sharding in ("Optimizer", "Gradients", "Full")),
    Case(data=N, sharding="Full", homes="dhD", clipping="PerUnit", window=1),
]

COMMON = [
    *(Case(pipeline=4, blocks=1, sharding=s, homes=home, precision="float32") for s in ZERO for home in "dh"),
    *(Case(pipeline=2, data=2, blocks=1, sharding=s, precision="bfloat16", homes="dhD") for s in ZERO),
]
"""All pipeline ranks use the one block."""

Results = dict[Case, list[Result]]
want([*SHARDED, *OTHERS, *PADDED, *COMMON])


@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.sharding)
def test_state_bytes_follow_from_the_sharding(case: Case, engine_results: Results) -> None:
    numels = [unit.numel for unit in units_of(case.model, Sharing(blocks=case.layers))]
    assert all(numel % N for numel in numels)
    expected = {}
    for name, size, is_split in zip(
        ("weights", "moments", "gradients"), (WEIGHTS, MOMENTS, GRADIENTS), ZERO[case.sharding], strict=True
    ):
        expected[name] = sum(_kept(case, numel, is_split=is_split) for numel in numels) * size
    for result in engine_results[case]:
        assert result.state_bytes == expected


def _kept(case: Case, numel: int, *, is_split: bool) -> int:
    """Return the number of elements kept. Vectors that stay whole beside shards have the same padding as the shards."""
    padded = numel if case.sharding == "None" else numel + -numel % (N * VECTOR)
    return padded // N if is_split else padded


@pytest.mark.parametrize("case", [*SHARDED, *OTHERS], ids=lambda case: case.name)
def test_state_bytes_equal_the_plan(case: Case, engine_results: Results) -> None:
    sizes = Sizes(
        model=case.model,
        units=units_of(case.model, Sharing(blocks=case.layers)),
        compute_bytes=compute_bytes(case.precision),
        master_bytes=master_bytes(case.precision),
        micro_batch=SEQUENCES_OF_A_MICRO_BATCH,
        moments=case.moments,
        gradients=case.gradients,
        uses_muon=case.algorithm == "Muon",
    )
    states = [unit_state(case.layout, sizes, unit) for unit in range(case.layout.units)]
    predicted = sum(state.device + state.host + state.disk for state in states)
    for result in engine_results[case]:
        assert sum(result.state_bytes.values()) == predicted


def test_muon_keeps_no_second_moments_of_matrices(engine_results: Results) -> None:
    """16 bytes of state in a parameter of float32, and 12 in one that Muon updates."""
    case = next(case for case in OTHERS if case.algorithm == "Muon" and case.precision == "float32")
    numels = [unit.numel for unit in units_of(case.model, Sharing(blocks=case.layers))]
    (result,) = engine_results[case]
    assert sum(result.state_bytes.values()) == 16 * sum(numels) - 4 * 6144 * case.layers


@pytest.mark.parametrize("case", COMMON, ids=lambda case: case.name)
def test_a_cross_stage_block_is_sharded_over_all_its_ranks_as_planned(case: Case, engine_results: Results) -> None:
    for rank, result in enumerate(engine_results[case]):
        local = case.layout.local_units(rank // case.data)
        states = [unit_state(case.layout, sizes_of(case), unit) for unit in local]
        assert sum(result.state_bytes.values()) == sum(state.device + state.host + state.disk for state in states)


@pytest.mark.parametrize("case", PADDED, ids=lambda case: case.name)
def test_shard_padding_affects_neither_norm_nor_weights(case: Case, engine_results: Results) -> None:
    """Padding contributes neither to the norm for clipping, nor to weights."""
    losses, weights = reference.train(case)
    assert engine_results[case][0].losses == pytest.approx(losses, rel=1e-12)
    for name, expected in weights.items():
        torch.testing.assert_close(engine_results[case][0].weights[name], expected, rtol=0, atol=1e-12)
