"""Bytes of state under each kind of sharding, counted by hand per parameter."""

from dataclasses import replace
from typing import Any

import pytest
from pseudoreal_trainer.plan.effects import traffic_bytes
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
from pseudoreal_trainer.plan.memory.communicators import COMMUNICATOR_BYTES, communicators
from pseudoreal_trainer.plan.memory.tiers import Tiers, resident_bytes, unit_state
from pseudoreal_trainer.plan.orders import gradient_buffers
from pseudoreal_trainer.plan.sizes import Device, Sizes

from tests.unit.trainer.plan.memory.support import large_model
from tests.unit.trainer.plan.support.cases import everywhere, make_layout, make_sizes

D = 4
"""Number of data ranks; divides the parameters of a block."""

STATE: list[tuple[str, str, str, dict[str, float]]] = [
    # sharding, compute, home -> bytes per parameter on each tier: weights, moments, gradient, working copy
    ("None", "float32", "Device", {"device": 4 + 8 + 4}),
    ("None", "bfloat16", "Device", {"device": 4 + 8 + 4 + 2}),
    ("None", "float64", "Device", {"device": 8 + 16 + 8}),
    ("Optimizer", "float32", "Device", {"device": 4 + 8 / D + 4}),
    ("Optimizer", "bfloat16", "Device", {"device": 2 + (4 + 8) / D + 4}),
    ("Gradients", "float32", "Device", {"device": 4 + 8 / D + 4 / D}),
    ("Gradients", "bfloat16", "Device", {"device": 2 + (4 + 8 + 4) / D}),
    ("Full", "float32", "Device", {"device": (4 + 8 + 4) / D}),
    ("Full", "bfloat16", "Device", {"device": (4 + 8 + 4 + 2) / D}),
    ("None", "float32", "Host", {"host": 4 + 8 + 4}),
    ("Full", "float32", "Host", {"host": (4 + 8 + 4) / D}),
    ("Optimizer", "bfloat16", "Host", {"host": (4 + 8 + 4 + 2) / D}),
    ("Full", "float32", "Disk", {"disk": (4 + 8 + 4) / D}),
    ("Full", "bfloat16", "Disk", {"disk": (4 + 8 + 4 + 2) / D}),
]


@pytest.mark.parametrize(("sharding", "compute", "home", "expected"), STATE)
def test_state_of_a_block(sharding: str, compute: str, home: Any, expected: dict[str, float]) -> None:
    sizes = make_sizes(compute=compute)
    layout = make_layout(data=D, sharding=sharding, homes=everywhere(home, 4))
    block = sizes.units[1].numel
    assert block % D == 0
    assert unit_state(layout, sizes, 1) == Tiers(**{tier: round(b * block) for tier, b in expected.items()})


COMMON: list[tuple[str, str, str, dict[str, float]]] = [
    # The same for a block used by two pipeline ranks of two data ranks; its working copy stays until the end of the
    # step.
    ("None", "float32", "Device", {"device": 4 + 8 / D + 4}),
    ("None", "bfloat16", "Device", {"device": 2 + (4 + 8) / D + 4}),
    ("Optimizer", "float32", "Device", {"device": 4 + 8 / D + 4}),
    ("Gradients", "bfloat16", "Device", {"device": 2 + (4 + 8 + 4) / D}),
    ("Full", "bfloat16", "Device", {"device": 2 + (4 + 8 + 4) / D}),
    ("None", "float32", "Host", {"device": 4, "host": (4 + 8 + 4) / D}),
    ("Full", "bfloat16", "Host", {"device": 2, "host": (4 + 8 + 4 + 2) / D}),
    ("None", "bfloat16", "Disk", {"device": 2, "disk": (4 + 8 + 4 + 2) / D}),
]


@pytest.mark.parametrize(("sharding", "compute", "home", "expected"), COMMON)
def test_state_of_a_block_of_two_pipeline_ranks(
    sharding: str, compute: str, home: Any, expected: dict[str, float]
) -> None:
    sizes = make_sizes(blocks=1, compute=compute)
    layout = make_layout(data=D // 2, sharding=sharding, layer_blocks=(0,) * 4, homes=everywhere(home, 1))
    block = sizes.units[1].numel
    assert unit_state(layout, sizes, 1) == Tiers(**{tier: round(b * block) for tier, b in expected.items()})


@pytest.mark.parametrize("pipeline", [1, 2, 4, 8])
def test_moments_of_shared_blocks_shrink_with_the_pipeline(pipeline: int) -> None:
    sizes = make_sizes(8, blocks=1, compute="bfloat16")
    layout = make_layout(8, pipeline, layer_blocks=(0,) * 8, homes=everywhere("Host", 1))
    block = sizes.units[1].shard_length(pipeline) * pipeline
    assert unit_state(layout, sizes, 1).host == (4 + 8 + 4 + 2) * block // pipeline


def test_a_unit_on_disk_keeps_no_gradient_there_when_its_update_follows_at_once() -> None:
    sizes = make_sizes()
    layout = make_layout(homes=everywhere("Disk", 4), clipping="PerUnit")
    assert unit_state(layout, sizes, 1).disk == 12 * sizes.units[1].numel


def test_shards_are_padded_to_one_length() -> None:
    sizes = make_sizes()
    layout = make_layout(data=3, sharding="Full")
    head = sizes.units[-1].numel
    assert head % (3 * 16)
    assert unit_state(layout, sizes, layout.units - 1).device == 16 * 16 * (head // (3 * 16) + 1)


def test_the_window_has_room_for_as_many_units_as_move() -> None:
    sizes, block = make_sizes(8), make_sizes(8).units[1].numel
    for moving, window, slots in ((0, 2, 0), (1, 2, 1), (2, 2, 2), (8, 2, 2), (8, 5, 5), (8, 99, 8)):
        homes = ("Device", *("Host",) * moving, *("Device",) * (8 - moving), "Device")
        layout = make_layout(8, 1, homes=homes, window=window)
        rest = sum(unit_state(layout, sizes, unit).device for unit in range(layout.units))
        buffers = min(2, moving)
        assert resident_bytes(layout, sizes, 0).device - rest == (slots + buffers) * 4 * block


OF_RANKS: list[tuple[str, int, str, str, int, int]] = [
    # sharding, data ranks, home, clipping -> slots with a copied shard, results of reductions, on a GPU
    ("Full", D, "Host", "Global", 3, 2),
    ("Optimizer", D, "Disk", "PerUnit", 3, 2),
    ("Full", D, "Device", "Global", 0, 0),  # the state is where the gather reads and the reduction writes
    ("None", D, "Host", "Global", 0, 0),  # every rank copies the whole unit into its slot, and reduces it in place
    ("Full", 1, "Host", "Global", 0, 0),
]


@pytest.mark.parametrize("device", ["accelerator", "cpu"])
@pytest.mark.parametrize(("sharding", "data", "home", "clipping", "copies", "results"), OF_RANKS)
def test_shards_that_cross_the_bus_are_counted_on_the_device(
    sharding: str, data: int, home: Any, clipping: str, copies: int, results: int, device: Device
) -> None:
    """Beside the state, a window of three whole units and two gradients."""
    sizes = make_sizes(8, compute="bfloat16", device=device, micro_batch=D)
    homes = ("Device", *(home,) * 8, "Device")
    layout = make_layout(8, 1, data=data, sharding=sharding, homes=homes, window=3, clipping=clipping)
    block = sizes.units[1].numel
    assert block % (16 * D) == 0, "shards have no padding"
    state = sum(unit_state(layout, sizes, unit).device for unit in range(layout.units))
    buffers = _buffers_and_window(layout, sizes)
    found = resident_bytes(layout, sizes, 0).device - state - buffers
    if device == "cpu":
        # The gather reads the home, and a reduction writes into a kept gradient, so only others have a result.
        assert found == (4 * results * block // data if clipping == "PerUnit" else 0)
        return
    # Eight bytes of a token of each input and the last target, in one micro-batch of a sequence a rank or of all.
    tokens = layout.micro_batches * _blocks_of_512(8 * (D // data) * (sizes.model.sequence_length + 1))
    of_shards = copies * _blocks_of_512(2 * block // data) + results * _blocks_of_512(4 * block // data)
    assert found - COMMUNICATOR_BYTES * communicators(layout, 0) == tokens + of_shards


def _buffers_and_window(layout: Layout, sizes: Sizes) -> int:
    window = 2 * 3 * max((sizes.whole(layout, unit) for unit in layout.moving_units(0, "Blocks")), default=0)
    return window + 4 * sum(max(sizes.whole(layout, unit) for unit in units) for units in gradient_buffers(layout, 0))


def _blocks_of_512(size: int) -> int:
    return -(-size // 512) * 512


def test_tokens_on_a_gpu_have_positions_if_documents_are_masked() -> None:
    """A pipeline rank between the embedding and the head has tokens only to find documents."""
    layout, sizes = make_layout(6, 3, 2), make_sizes(6, device="accelerator")
    of_tokens = 2 * _blocks_of_512(8 * sizes.micro_batch * (sizes.model.sequence_length + 1))
    of_positions = 2 * _blocks_of_512(8 * sizes.micro_batch * sizes.model.sequence_length)
    masked = replace(sizes, masks_documents=True)
    for rank, more in enumerate((of_positions, of_tokens + of_positions, of_positions)):
        assert resident_bytes(layout, masked, rank).device - resident_bytes(layout, sizes, rank).device == more


def test_staging_for_the_disk_does_not_grow_with_the_units_on_it() -> None:
    sizes = make_sizes(8)
    few, all_ = (make_layout(8, 1, homes=("Host",) * (10 - n) + ("Disk",) * n) for n in (2, 9))
    states = [sum(unit_state(lo, sizes, unit).host for unit in range(lo.units)) for lo in (few, all_)]
    assert resident_bytes(few, sizes, 0).host - states[0] == resident_bytes(all_, sizes, 0).host - states[1] > 0


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (make_layout(6, 1, homes=everywhere("Host", 6)), 2),
        (make_layout(6, 1, homes=everywhere("Host", 6), order="GPipe", micro_batches=3), 8),
        # With one micro-batch, breadth-first and depth-first orders coincide.
        (make_layout(6, 1, 1, homes=everywhere("Host", 6), order="GPipe"), 2),
        (make_layout(6, 1), 0),
        # Blocks 0, 1, 2 are each used twice in turn: three gradients accumulate at the same time, and one more is
        # reduced.
        (make_layout(6, 1, layer_blocks=(0, 1, 2, 0, 1, 2), homes=("Host",) * 5), 4),
        (make_layout(6, 1, layer_blocks=(0, 0, 1, 1, 2, 2), homes=("Host",) * 5), 2),
    ],
)
def test_gradients_that_accumulate_at_the_same_time_have_a_buffer_each(layout: Layout, expected: int) -> None:
    assert len(gradient_buffers(layout, 0)) == expected


@pytest.mark.parametrize("order", ["1F1B", "GPipe"])
def test_depth_first_orders_have_memory_for_one_gradient_per_parameter(order: str) -> None:
    """All gradients accumulate at the same time. Embedding and head are much larger than a block."""
    sizes = make_sizes(6, vocabularySize=8000)
    assert sizes.units[0].numel > 15 * sizes.units[1].numel
    layout = make_layout(6, 1, 3, data=4, sharding="Full", order=order, homes=everywhere("Host", 6))
    window = 2 * 4 * sizes.whole(layout, 7)
    gradients = 4 * sum(sizes.whole(layout, unit) for unit in range(layout.units))
    assert resident_bytes(layout, sizes, 0).device == window + gradients


def test_layered_orders_have_memory_for_two_gradients() -> None:
    """The units take the two buffers in turn: head and blocks 4, 2, 0; blocks 5, 3, 1 and the embedding."""
    sizes = make_sizes(6, vocabularySize=8000)
    layout = make_layout(6, 1, 3, homes=everywhere("Host", 6))
    assert gradient_buffers(layout, 0) == [[7, 5, 3, 1], [6, 4, 2, 0]]
    window = 2 * 4 * sizes.whole(layout, 7)
    gradients = 4 * (sizes.whole(layout, 0) + sizes.whole(layout, 7))
    assert resident_bytes(layout, sizes, 0).device == window + gradients


@pytest.mark.parametrize(
    ("blocks", "order", "gradients"),
    # For 6 layers: whole gradients in flight, plus four vectors per shared block.
    [
        ((0,) * 6, "Layered", 1 + 4),
        ((0, 1, 2) * 2, "Layered", 1 + 12),
        ((0,) * 6, "GPipe", 6 + 4),
        (range(6), "Layered", 0),
    ],
)
def test_measuring_steps_have_their_gradient_buffers(blocks: tuple[int, ...], order: str, gradients: int) -> None:
    sizes = make_sizes(6, len(set(blocks)))
    layout = make_layout(6, 1, layer_blocks=tuple(blocks), order=order)
    more = resident_bytes(replace(layout, measures=True), sizes, 0).device - resident_bytes(layout, sizes, 0).device
    assert more == gradients * 4 * sizes.units[1].numel


@pytest.mark.parametrize(("window", "bytes_of_mask"), [(None, 0), (16, 0), (15, 4 * 16 * 16)])
def test_all_windows_have_one_mask_if_they_are_shorter_than_a_sequence(window: int | None, bytes_of_mask: int) -> None:
    attention: dict[str, Any] = {"heads": 2} | ({"window": {"size": window, "layers": [1, 2]}} if window else {})
    layout = make_layout(6, 1)
    more = (
        resident_bytes(layout, make_sizes(6, attention=attention), 0).device
        - resident_bytes(layout, make_sizes(6), 0).device
    )
    assert more == bytes_of_mask


def test_checkpoints_pass_through_host_memory() -> None:
    layout, sizes = make_layout(6, 1), make_sizes(6)
    assert (
        resident_bytes(layout, replace(sizes, checkpoint_buffer=1000), 0).host
        == resident_bytes(layout, sizes, 0).host + 1000
    )


@pytest.mark.parametrize(
    ("device", "home", "clipping", "scaled"),
    [
        ("cpu", "Device", "PerUnit", True),
        ("cpu", "Disk", "None", False),
        ("accelerator", "Disk", "Global", True),
        ("accelerator", "Device", "Global", False),
    ],
)
def test_each_thread_that_updates_on_the_host_has_room_for_clipped_gradients(
    device: Device, home: Any, clipping: str, scaled: bool
) -> None:
    layout, sizes = make_layout(6, 1, homes=everywhere(home, 6), clipping=clipping), make_sizes(6, device=device)
    few, many = (resident_bytes(layout, replace(sizes, threads=threads), 0) for threads in (1, 5))
    more = 3 if device == "accelerator" else 4  # beside an accelerator, one of five threads launches kernels
    assert many.host - few.host == (more * 4 * 2**19 if scaled else 0)
    assert replace(many, host=0) == replace(few, host=0)


def walked(layout: Layout, sizes: Sizes) -> tuple[int, int]:
    peak = activation_peak(layout, sizes, 0, step_plan(layout)[0])
    return peak.device, peak.host


@pytest.mark.parametrize("n", [1, 3, 8])
def test_inputs_of_all_micro_batches_are_alive_when_backward_starts(n: int) -> None:
    """method.md 2.5: the memory cost of the layered order."""
    sizes, layout = make_sizes(6), make_layout(6, 1, n)
    graphs = AutogradMemory(sizes, sizes.max_tokens(make_layout(6, 1, 1)))
    head = n * 7 * graphs.boundary + graphs.head_backward
    # The head has turned one input into a gradient per micro-batch.
    last_block = n * 7 * graphs.boundary + graphs.block_backward
    assert walked(layout, sizes)[0] == max(head, last_block)


def test_depth_first_with_as_many_warm_up_passes_keeps_one_micro_batch() -> None:
    sizes = make_sizes(6)
    graphs = AutogradMemory(sizes, sizes.max_tokens(make_layout(6, 1, 1)))
    for n in (1, 5):
        most = 7 * graphs.boundary + max(graphs.head_backward, graphs.block_backward)
        assert walked(make_layout(6, 1, n, order="1F1B"), sizes)[0] == most


def test_offloaded_inputs_count_as_host_bytes() -> None:
    sizes, layout = make_sizes(6), make_layout(6, 1, 4)
    boundary = AutogradMemory(sizes, sizes.max_tokens(make_layout(6, 1, 1))).boundary
    device, _ = walked(layout, sizes)
    stashed, on_host = walked(replace(layout, stash=True), sizes)
    assert on_host == 6 * 4 * boundary
    assert device - stashed >= (6 - 2) * 4 * boundary


def test_kept_graphs_take_more_bytes_than_kept_inputs() -> None:
    sizes, n, layers = make_sizes(6), 3, 6
    graphs = AutogradMemory(sizes, sizes.max_tokens(make_layout(6, 1, 1)))
    kept, _ = walked(make_layout(6, 1, n, keep="All"), sizes)
    assert kept > n * layers * graphs.block
    assert kept < n * layers * (graphs.block + 2 * graphs.boundary) + graphs.block_backward + graphs.head_backward


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
def test_moments_in_bfloat16_take_four_bytes_less_and_scratch_memory(home: Any) -> None:
    """The scratch memory: both moments, numbers, random words and shifted words, 4 bytes each."""
    threads = 3
    wide = replace(large_model.SIZES, threads=threads)
    of_layout = large_model.layout(home)
    before, after = (resident_bytes(of_layout, sizes, 0) for sizes in (wide, replace(wide, moments="BFloat16")))
    padded = sum(wide.shard(of_layout, unit) for unit in range(of_layout.units))
    saved = {"Device": before.device - after.device, "Host": before.host - after.host, "Disk": before.disk - after.disk}
    scratch = {"Device": 20 << 21, "Host": threads * (20 << 19), "Disk": 0}
    assert saved[home] == 4 * padded - scratch[home]
    if home == "Disk":
        chunks = 3 * 2 * 2 * 2**20
        assert after.host - before.host == threads * (20 << 19) - chunks


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
def test_gradients_in_bfloat16_take_two_bytes_less_in_their_home_and_on_the_bus(home: Any) -> None:
    """The scratch memory: 2,097,152 numbers on the device, and on the host a buffer for each thread, which the clipping
    needs anyway."""
    wide = replace(large_model.SIZES, threads=3)
    rounded, of_layout = replace(wide, gradients="BFloat16"), replace(large_model.layout(home), clipping="Global")
    before, after = (resident_bytes(of_layout, sizes, 0) for sizes in (wide, rounded))
    (plan,) = step_plan(of_layout)
    moved, moved_less = (traffic_bytes(of_layout, sizes, plan) for sizes in (wide, rounded))
    of_gradients = 4 * sum(wide.shard(of_layout, unit) for unit in range(of_layout.units))
    assert after.device - before.device == 4 << 20
    assert moved["d2h"] == 2 * moved_less["d2h"] == (0 if home == "Device" else of_gradients)
    if home == "Host":
        assert before.host - after.host == of_gradients // 2
    if home == "Disk":
        longest = max(wide.shard(of_layout, unit) for unit in range(of_layout.units))
        assert before.disk - after.disk == of_gradients // 2
        assert before.host - after.host == pytest.approx(2 * longest + 3 * 2 * 2**20, abs=2 * 4096)
        for direction in ("disk_read", "disk_write"):
            assert moved[direction] - moved_less[direction] == of_gradients // 2


@pytest.mark.parametrize("home", ["Device", "Host", "Disk"])
def test_moments_in_blocks_take_two_bytes_and_an_eighth_and_scratch_memory(home: Any) -> None:
    """Blocks need 1.25 bytes an element of scratch memory besides that of bfloat16. On the host, a checkpoint unpacks
    262,144 elements at a time, with 11.25 bytes each."""
    threads = 3
    wide = replace(large_model.SIZES, threads=threads, checkpoint_buffer=1)
    of_layout = large_model.layout(home)
    before, after = (resident_bytes(of_layout, sizes, 0) for sizes in (wide, replace(wide, moments="Float8")))
    padded = sum(wide.shard(of_layout, unit) for unit in range(of_layout.units))
    assert padded % 16 == 0
    saved = {"Device": before.device - after.device, "Host": before.host - after.host, "Disk": before.disk - after.disk}
    on_host, unpacked = threads * (85 << 17), 45 << 16
    lost = {"Device": 85 << 19, "Host": on_host + unpacked, "Disk": 0}
    assert saved[home] == 8 * padded - 2 * padded * 17 // 16 - lost[home]
    if home == "Disk":
        chunks = 3 * 2 * (4 * 2**20 - 17 * 2**16)
        assert after.host - before.host == on_host + unpacked - chunks
