"""Step time predictions against hand calculations, on machines with one slow part at a time."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_api.spec.optimizer import MomentFormat
from pseudoreal_api.spec.phase import Keep
from pseudoreal_trainer.estimate.time.costs import ROUNDING_ON_HOST, MeasuredCosts
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.estimate.time.predict import Prediction, predict
from pseudoreal_trainer.plan.effects import Resource
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.records import Backward, Fetch, Forward, Reduce, Speculate, Update
from pseudoreal_trainer.plan.sizes import Sizes

from tests.unit.trainer.estimate.time.support.profiles import profile
from tests.unit.trainer.plan.support.cases import everywhere, make_layout, make_sizes

L, N = 6, 2
SIZES = make_sizes(L)


def seconds(layout: Layout, hardware: HardwareProfile, sizes: Sizes = SIZES) -> float:
    return predict(layout, sizes, hardware, "float32").timeline.seconds


def block_flops(sizes: Sizes = SIZES) -> int:
    """Return the operations of a block's forward pass of a micro-batch: per token, 2 per matrix weight and 2 T H for
    causal attention. A token meets one expert of each prototype; all experts have the same size."""
    model = sizes.model
    parameters = {unit.name: [p for p in unit.parameters if p.is_matrix] for unit in sizes.units}
    matrices = sum(p.numel for p in parameters["blocks.0"])
    if model.experts:
        of_all = sum(p.numel for p in parameters["blocks.0.experts"])
        matrices += of_all // model.experts.count * model.experts.prototypes
    return sizes.micro_batch * model.sequence_length * (2 * matrices + 2 * model.sequence_length * model.hidden_size)


LAST = 2 * SIZES.micro_batch * SIZES.model.sequence_length * SIZES.model.hidden_size * SIZES.model.feed_forward.size
"""Operations of the last product of a layer's forward pass."""
RECOMPUTED = 4 - LAST / block_flops()
"""All passes of a layer, in forward passes, if the backward pass recomputes the layer, without its last product."""


@pytest.mark.parametrize(("keep", "forwards"), [("Inputs", RECOMPUTED), ("Products", 3), ("All", 3)])
def test_step_time_is_compute_if_nothing_else_takes_time(keep: Keep, forwards: float) -> None:
    """A backward pass costs two forward passes, and nearly three if whole blocks are recomputed. Memory takes no time
    in this profile."""
    layout = make_layout(L, 1, N, keep=keep)
    assert seconds(layout, profile(flops=block_flops())) == pytest.approx(L * N * forwards)


@pytest.mark.parametrize(("activation", "accesses"), [("GELU", 2), ("SwiGLU", 7)])
def test_selective_recomputation_takes_the_time_of_its_memory_traffic(activation: str, accesses: int) -> None:
    """Two norms read and write H features each. GELU reads and writes one tensor; SwiGLU computes SiLU twice, and one
    product of two tensors."""
    sizes = make_sizes(L, feedForward={"size": 96, "activation": activation})
    slow = profile(memory_bytes_per_second=1)
    kept, recomputed = (seconds(make_layout(L, 1, N, keep=keep), slow, sizes) for keep in ("All", "Products"))
    tokens = sizes.micro_batch * sizes.model.sequence_length
    moved = (2 * 2 * sizes.model.hidden_size + accesses * 96) * tokens * sizes.compute_bytes
    assert recomputed - kept == pytest.approx(L * N * moved)


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("experts", [{"count": 12}, {"count": 12, "prototypes": 4}, {"count": 1}])
def test_a_token_costs_the_experts_that_it_meets(experts: dict[str, Any], activation: str) -> None:
    sizes = make_sizes(L, experts=experts, feedForward={"size": 96, "activation": activation})
    layout = make_layout(L, pipeline=1, micro_batches=N, layer_experts=tuple(range(L)))
    assert seconds(layout, profile(flops=block_flops(sizes)), sizes) == pytest.approx(L * N * 4)
    assert block_flops(sizes) >= block_flops(make_sizes(L, feedForward={"size": 96, "activation": activation}))


def test_a_step_does_not_begin_before_the_loss_of_the_one_before_is_known() -> None:
    assert seconds(make_layout(L, 2, N), profile(agree_seconds=7)) == pytest.approx(7)


def weights(sizes: Sizes = SIZES) -> int:
    return sum(unit.numel for unit in sizes.units)


def test_transfers_that_overlap_nothing_add_to_the_step() -> None:
    host = make_layout(L, 1, N, homes=everywhere("Host", L))
    fetched = 2 * weights() - sum(unit.numel for unit in SIZES.units[-2:])
    assert seconds(host, profile(h2d=4)) == pytest.approx(fetched)
    assert seconds(host, profile(d2h=4)) == pytest.approx(weights())
    sharded = make_layout(L, 1, N, data=2, sharding="Full")
    assert seconds(sharded, profile(reduce_scatter=4)) == pytest.approx(weights() / 2, rel=0.01)


def test_compute_hides_half_as_much_copying() -> None:
    """The copies of each block take half of the time of its passes. Only the first unit's fetch stays visible."""
    layout = make_layout(L, 1, N, homes=everywhere("Host", L))
    compute = L * N * RECOMPUTED
    speed = 2 * 4 * weights() / (compute / 2)
    predicted = seconds(layout, profile(flops=block_flops(), h2d=speed))
    assert compute < predicted < 1.1 * compute
    assert seconds(layout, profile(flops=block_flops(), h2d=speed / 4)) > 1.5 * compute


def test_copies_add_to_the_step_without_overlap() -> None:
    layout = make_layout(L, 1, N, homes=everywhere("Host", L))
    alone = seconds(layout, profile(flops=block_flops(), overlaps=False))
    fetched = 2 * weights() - sum(unit.numel for unit in SIZES.units[-2:])
    speed = 4 * fetched / 10.0
    assert seconds(layout, profile(flops=block_flops(), overlaps=False, h2d=speed)) == pytest.approx(alone + 10)


@pytest.mark.parametrize("clipping", ["Global", "PerUnit"])
def test_updates_on_the_host_overlap_compute_on_a_gpu_and_not_on_shared_cores(clipping: str) -> None:
    layout = make_layout(L, 1, N, homes=everywhere("Host", L), clipping=clipping)
    compute = L * N * RECOMPUTED
    slow: dict[str, Any] = {"update_on_host_seconds_per_element": compute / 2 / weights(), "flops": block_flops()}
    beside, shared = (seconds(layout, profile(overlaps=overlaps, **slow)) for overlaps in (True, False))
    assert beside < 1.35 * compute
    assert shared == pytest.approx(1.5 * compute, rel=0.02)


def test_speculative_updates_overlap_the_backward_pass() -> None:
    """With recomputation, the backward pass is nearly three quarters of the passes.

    First, all updates take half as long as all passes, and 1.4 times that if they are speculative. The backward pass
    hides speculative updates, except those of the first layer and of the embedding, whose gradients are reduced last.
    Updates that wait for the norm delay the forward pass. Then updates take twice as long as the passes: the agreement
    comes before all of them have speculated, and the others run as usual.
    """
    layout = make_layout(L, 1, N, homes=everywhere("Host", L))
    speculative = replace(layout, speculates=True)
    compute = L * N * RECOMPUTED
    backward = 1 - 1 / RECOMPUTED

    def ratios(share: float, *, overlaps: bool = True) -> list[float]:
        slow: dict[str, Any] = {"update_on_host_seconds_per_element": share * compute / weights()}
        hardware = profile(flops=block_flops(), overlaps=overlaps, **slow)
        return [seconds(one, hardware) / compute for one in (layout, speculative)]

    waits, speculates = ratios(0.5)
    assert waits == pytest.approx(1.25, rel=0.05)
    last = SIZES.units[0].numel + 1.4 * SIZES.units[1].numel
    assert speculates == pytest.approx(1 + 0.5 * last / weights(), rel=0.02)
    waits, speculates = ratios(2.0)
    assert waits == pytest.approx(backward + 2, rel=0.05)
    assert speculates == pytest.approx(backward + 2 - backward / 1.4, rel=0.1)
    assert ratios(0.5, overlaps=False) == pytest.approx([1.5, 1.7], rel=0.03)


def test_ranks_share_the_available_cores() -> None:
    """Four ranks on the cores for two take twice as long."""
    layout = make_layout(L, 2, 8, data=2)
    two, four = (profile(flops=block_flops(), overlaps=False, ranks=ranks) for ranks in (2, 4))
    assert seconds(layout, two) == pytest.approx(2 * seconds(layout, four), rel=0.15)


def test_a_disk_that_is_slower_than_the_optimizer_bounds_the_update() -> None:
    layout = make_layout(L, 1, N, homes=everywhere("Disk", L))
    slow = profile(disk_read=16, update_on_host_seconds_per_element=0.5)
    fetched = 2 * weights() - sum(unit.numel for unit in SIZES.units[-2:])
    assert weights() < seconds(layout, slow) < weights() + fetched / 4 + 1


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
def test_a_block_of_two_pipeline_ranks_is_summed_and_gathered_over_both(home: str) -> None:
    """Once per step each rank sends half of the block's gradient to the other, and gets half of the weights back."""
    sizes = make_sizes(L, 1)
    layout = make_layout(L, 2, N, layer_blocks=(0,) * L, order="GPipe", homes=("Device", home, "Device"))
    half = 4 * sizes.units[1].shard_length(2)
    summing, gathering = (
        MeasuredCosts(slow, layout, sizes, "float32") for slow in (profile(reduce_scatter=1.0), profile(all_gather=1.0))
    )
    summed, gathered = (
        summing.seconds(Reduce(1), Resource.COLLECTIVE),
        gathering.seconds(Fetch(1), Resource.COLLECTIVE),
    )
    assert summed == gathered == pytest.approx(half)
    if home == "Device":
        slow = profile(reduce_scatter=1.0, all_gather=1.0)
        assert seconds(layout, slow, sizes) == pytest.approx(2 * half)


def found(layout: Layout, hardware: HardwareProfile) -> Prediction:
    return predict(layout, SIZES, hardware, "float32")


def test_the_bottleneck_is_named() -> None:
    host = make_layout(L, 1, N, homes=everywhere("Host", L))
    sharded = make_layout(L, 1, N, data=2, sharding="Full")
    cases = [
        (found(host, profile(flops=1)), "the forward and backward passes of pipeline rank 0 take 100%"),
        (found(host, profile(h2d=1)), "the copies from host to device of pipeline rank 0 take 100%"),
        (found(sharded, profile(all_gather=1)), "the collectives between data ranks of pipeline rank 0 take 100%"),
        (found(make_layout(L, 6, 1), profile(flops=1)), "waiting: no part is busy for half of the step"),
    ]
    for prediction, words in cases:
        assert words in prediction.bottleneck


def test_idle_share_of_a_pipeline_is_that_of_unit_time_when_nothing_else_takes_time() -> None:
    p, v, n = 3, 2, 6
    extra = (p - 1) / (v * n)
    assert found(make_layout(p * v, p, n), profile(flops=1)).idle_share == pytest.approx(extra / (1 + extra))


def test_tokens_that_hide_a_transfer() -> None:
    """With this many tokens, compute and the transfer take equally long."""
    layout = make_layout(L, 1, N, homes=everywhere("Host", L))
    hardware = profile(flops=block_flops() / 10, h2d=4.0, update_on_host_seconds_per_element=1.0)
    tokens = found(layout, hardware).tokens_to_hide
    now = SIZES.micro_batch * SIZES.model.sequence_length * N
    costs = MeasuredCosts(hardware, layout, SIZES, "float32")
    compute = sum(
        costs.seconds(kind(layer, m), Resource.COMPUTE)
        for kind in (Forward, Backward)
        for layer in range(1, L + 1)
        for m in (0, 1)
    )
    fetched = 2 * weights() - sum(unit.numel for unit in SIZES.units[-2:])
    assert tokens["h2d"] == pytest.approx(now * fetched / compute, abs=1)
    assert tokens["optimizer"] == pytest.approx(now * weights() / compute, abs=1)
    assert "disk_read" not in tokens


def test_muon_adds_the_seconds_of_its_products() -> None:
    """On the device at the speed of passes, on the host of a GPU at the host's; on a CPU at the host's if measured."""
    layout = make_layout(L, 1, N, homes=everywhere("Host", L), speculates=True)
    on_device = make_layout(L, 1, N)
    sizes, rows = replace(SIZES, uses_muon=True), SIZES.model.hidden_size
    long = SIZES.model.feed_forward.size
    products = 5 * (4 * 6 * rows**3 + 2 * (4 * rows * rows * long + 2 * rows**3))

    def added(layout: Layout, hardware: HardwareProfile) -> float:
        with_muon, without = (MeasuredCosts(hardware, layout, one, "float32") for one in (sizes, SIZES))
        return with_muon.loads(Update(1))["optimizer"] - without.loads(Update(1))["optimizer"]

    gpu, measured = profile(), profile(host_flops_per_second=2e9)
    cpu = gpu.model_copy(update={"overlaps": False})
    of_passes = gpu.speeds[0].passes[0].block_forward_flops_per_second
    assert added(on_device, gpu) == added(on_device, measured) == pytest.approx(products / of_passes)
    assert added(layout, gpu) == pytest.approx(products / 1e12)
    assert added(layout, measured) == pytest.approx(products / 2e9)
    assert added(layout, cpu) == pytest.approx(products / of_passes)
    assert added(layout, measured.model_copy(update={"overlaps": False})) == pytest.approx(products / 2e9)


def test_updates_that_round_moments_take_longer_and_copy_fewer_bytes() -> None:
    """On a CPU every home is in host memory. A speculative update also copies weights and moments: 12 of 30 bytes, or
    8 in bfloat16, or 6 and an eighth in blocks."""
    layout = make_layout(L, 1, N, homes=everywhere("Host", L), speculates=True)
    hardware = profile(update_on_host_seconds_per_element=1e-9)

    def of_records(moments: MomentFormat) -> list[float]:
        costs = MeasuredCosts(hardware, layout, replace(SIZES, moments=moments), "float32")
        return [costs.loads(record)["optimizer"] for record in (Update(1), Speculate(1))]

    plain, speculative = of_records("Master")
    assert speculative == pytest.approx(plain * 42 / 30)
    assert of_records("BFloat16") == pytest.approx([plain * 2.2, plain * (2.2 + 8 / 30)])
    host = ROUNDING_ON_HOST["Float8"]
    assert of_records("Float8") == pytest.approx([plain * host, plain * (host + 6.125 / 30)], rel=1e-3)
