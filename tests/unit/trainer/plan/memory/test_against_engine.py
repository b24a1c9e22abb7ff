"""Planned bytes against the engine's own counters of moved bytes, and against the allocator."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.effects import TRAFFIC, traffic_bytes
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.sizes import Sizes

from tests.support.depth import DEPTH
from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support.cases import RATE, WIDE, Case, each
from tests.unit.trainer.engine.support.running import CaseBatch, Result, make_engine, want
from tests.unit.trainer.plan.memory.support.allocations import allocated
from tests.unit.trainer.plan.memory.support.pipeline_peak import measure
from tests.unit.trainer.plan.memory.support.sizes_of_case import sizes_of

CPU = torch.device("cpu")
EVEN = json.dumps({"experts": {"type": "TopK", "count": 4, "topK": {"perToken": 4, "size": 8}}})
"""Every token goes to all experts, so all ranks' experts get the same number of tokens."""
LINKED = [
    *each(homes=["h", "D"], clipping=["Global", "PerUnit"]),
    Case(homes="hDd", precision="bfloat16", stash=True, micro_batches=3, window=3),
    Case(order="1F1B", homes="D", micro_batches=4, window=1),
    *each(data=2, sharding=["None", "Optimizer", "Gradients", "Full"], homes="dhD"),
    Case(data=2, sharding="Full", precision="bfloat16", homes="dhD", clipping="Global"),
    *each(data=4, replicas=2, sharding=["Optimizer", "Full"], homes="dhD"),
    Case(pipeline=2, layers=5, blocks=1, homes="D", clipping="Global"),
    *each(pipeline=4, blocks=1, sharding=["None", "Full"], homes="dhD", precision="bfloat16"),
    Case(pipeline=2, data=2, replicas=2, sharding="Full", blocks=1, homes="h", clipping="Global"),
    Case(pipeline=2, order="Interleaved", homes="hD", micro_batches=4, stash=True),
    Case(data=2, sharding="Full", homes="dhD", experts=6, prototypes=2, activation="SwiGLU"),
    Case(data=2, sharding="Full", homes="dhD", options="Qwen3MoE", clipping="Global"),
    *each(data=2, expert_ranks=2, drawn=EVEN, homes="dhD", clipping=["Global", "PerUnit"]),
    Case(data=2, expert_ranks=2, drawn=EVEN, keep="All", order="1F1B", micro_batches=4, homes="D"),
    *each(data=4, expert_ranks=2, drawn=EVEN, sharding=["None", "Full"], homes="dhD"),
    Case(data=4, replicas=2, expert_ranks=2, drawn=EVEN, sharding="Full", homes="h", precision="bfloat16"),
    Case(pipeline=2, data=2, expert_ranks=2, drawn=EVEN, part="Experts", blocks=1, homes="D"),
    *each(drawn=EVEN, expert_groups=[2, 4], homes="hD", window=1),
    *each(data=2, expert_ranks=2, drawn=EVEN, expert_groups=2, homes="dhD", keep=["Inputs", "Products", "All"]),
    Case(data=4, replicas=2, expert_ranks=2, drawn=EVEN, expert_groups=2, sharding="Full", homes="hd", stash=True),
    Case(data=2, drawn=EVEN, expert_groups=2, sharding="Full", homes="dhD", clipping="Global"),
    Case(tied=True, pipeline=2, homes="D", clipping="Global"),
    Case(tied=True, data=2, sharding="Full", homes="hD"),
    *each(homes="D", moments="BFloat16", precision=["bfloat16", "float32"], clipping=["Global", "PerUnit"]),
    Case(data=2, sharding="Full", moments="BFloat16", precision="bfloat16", homes="dhD", clipping="Global"),
    *each(homes="D", moments="Float8", drawn=WIDE, precision=["bfloat16", "float32"], clipping=["Global", "PerUnit"]),
    Case(data=2, sharding="Full", moments="Float8", drawn=WIDE, precision="bfloat16", homes="dhD", clipping="Global"),
]
LINKED += [
    *each(homes=["h", "D"], gradients="BFloat16", precision="bfloat16", clipping=["Global", "PerUnit"]),
    Case(data=2, sharding="Full", gradients="BFloat16", precision="float32", homes="dhD", clipping="Global"),
    Case(data=4, replicas=2, sharding="Full", gradients="BFloat16", moments="BFloat16", homes="hD"),
]
PAGES = json.dumps({"hiddenSize": 36, "attention": {"heads": 2}})
"""A block's matrices start and end inside of pages."""
LINKED += [
    *each(algorithm="Muon", drawn=PAGES, homes="D", clipping=["Global", "PerUnit"], precision=["float32", "bfloat16"]),
    Case(algorithm="Muon", drawn=EVEN, homes="D", clipping="Global"),
    Case(algorithm="Muon", pipeline=2, homes="hD", options="all biases and norms"),
]
CHOOSING = json.dumps({"experts": {"type": "TopK", "count": 9, "topK": {"perToken": 8, "size": 1}}})
"""A routing decision is as large as three inputs of a layer."""
CUT = json.dumps({"sequenceLength": 32})
"""Sequences with equal chunks for context ranks."""
CUT_EXPERTS = json.dumps(json.loads(CUT) | json.loads(EVEN))
LINKED += [
    *each(data=2, context_ranks=2, drawn=CUT, keep=["Inputs", "All"], sharding=["None", "Full"], homes="dhD"),
    Case(data=4, context_ranks=2, replicas=2, drawn=CUT, sharding="Full", precision="bfloat16", documents=True),
    *each(data=2, context_ranks=2, expert_ranks=2, drawn=CUT_EXPERTS, keep=["Inputs", "All"]),
    Case(pipeline=2, data=2, context_ranks=2, drawn=CUT, stash=True, homes="h"),
    *each(data=2, tensor_ranks=2, drawn=CUT, keep=["Inputs", "All"], sharding=["None", "Full"], homes="dhD"),
    Case(data=4, tensor_ranks=2, drawn=CUT, sharding="Full", precision="bfloat16", documents=True, clipping="Global"),
]
BALANCED = {"perToken": 4, "size": 8, "auxiliaryLoss": "0.2", "balanceOver": "Step", "biasUpdateRate": "0.1"}
OVER_STEPS = json.dumps({"experts": {"type": "TopK", "count": 4, "topK": BALANCED, "denseLayers": [1]}})
LINKED += [
    Case(data=1, drawn=OVER_STEPS, sharding="Full", micro_batches=2, homes="h"),
    Case(data=2, drawn=OVER_STEPS, sharding="Full", micro_batches=2, homes="h"),
    Case(data=3, drawn=OVER_STEPS, sharding="Full", micro_batches=4, homes="h"),
    Case(data=4, replicas=2, expert_ranks=2, drawn=OVER_STEPS, sharding="Full"),
    Case(pipeline=2, data=2, expert_ranks=2, drawn=OVER_STEPS, order="GPipe"),
]
want(LINKED)
ONE_RANK = [
    Case(precision="float32", micro_batches=6),
    Case(precision="float64", micro_batches=6, homes="h"),
    Case(precision="bfloat16", micro_batches=6, homes="h", clipping="Global", speculates=True),
    Case(precision="bfloat16", micro_batches=6, moments="BFloat16", homes="h", clipping="Global", speculates=True),
    Case(precision="bfloat16", micro_batches=6, moments="BFloat16", homes="d"),
    Case(precision="bfloat16", micro_batches=6, moments="Float8", drawn=WIDE, homes="h", clipping="Global"),
    Case(precision="bfloat16", micro_batches=6, moments="Float8", drawn=WIDE, homes="d"),
    *each(precision="bfloat16", micro_batches=6, gradients="BFloat16", homes=["d", "h"], clipping="Global"),
    Case(precision="float32", micro_batches=6, gradients="BFloat16", homes="h", clipping="PerUnit"),
    Case(precision="bfloat16", micro_batches=6, activation="SwiGLU"),
    *each(algorithm="Muon", precision="bfloat16", micro_batches=6, homes=["h", "d"], drawn=PAGES),
    Case(algorithm="Muon", precision="bfloat16", homes="h", clipping="Global", speculates=True, drawn=PAGES),
    Case(precision="float32", order="1F1B", micro_batches=6, homes="hd", window=1),
    *each(precision="float32", order=["1F1B", "Layered"], micro_batches=2, homes="h", vocabulary=3000),
    *each(precision="float32", keep=["Products", "All"], micro_batches=6, homes="h", activation=["GELU", "SwiGLU"]),
    Case(precision="bfloat16", keep="Products", micro_batches=6, homes="h", activation="SwiGLU"),
    Case(precision="float32", keep="Products", micro_batches=6, homes="h", options="Qwen3MoE"),
    Case(precision="float32", blocks=2, micro_batches=6, homes="h"),
    Case(precision="float32", clipping="PerUnit", layers=8, micro_batches=12),
    Case(precision="float32", micro_batches=6, homes="h", experts=6, prototypes=2),
    *each(precision="float32", micro_batches=6, homes="hd", options=["Qwen2", "OLMo2", "Qwen3MoE"]),
    *each(precision="float32", micro_batches=12, homes="h", drawn=CHOOSING, keep=["Inputs", "All"]),
    Case(precision="float32", micro_batches=12, homes="h", experts=8, prototypes=8),
    Case(precision="float32", micro_batches=6, homes="h", drawn=OVER_STEPS),
    *each(precision="float32", micro_batches=6, homes="h", drawn=EVEN, expert_groups=[2, 4], window=1),
    Case(precision="float32", micro_batches=6, homes="h", drawn=EVEN, expert_groups=2, keep="All"),
    Case(precision="bfloat16", micro_batches=2, homes="h", experts=4, prototypes=4, expert_groups=4, window=1),
    Case(precision="float32", micro_batches=6, vocabulary=3000, loss_chunk=8),
    Case(precision="float32", micro_batches=6, homes="h", documents=True),
    Case(precision="float32", keep="All", micro_batches=6, documents=True),
    Case(precision="bfloat16", micro_batches=6, vocabulary=3000, loss_chunk=7, homes="h", tied=True),
]


@pytest.mark.parametrize("case", LINKED, ids=lambda case: case.name)
def test_predicted_traffic_equals_the_engines(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    plan = step_plan(case.layout)
    for rank, result in enumerate(engine_results[case]):
        expected = traffic_bytes(case.layout, sizes_of(case), plan[rank // case.data])
        assert expected.total() > 0
        for moved in result.moved:
            assert {traffic: moved.get(traffic, 0) for traffic in TRAFFIC} == {
                traffic: expected[traffic] for traffic in TRAFFIC
            }


@pytest.mark.parametrize("case", ONE_RANK, ids=lambda case: case.name)
def test_predicted_peak_equals_the_allocators_in_a_step(case: Case, tmp_path: Path) -> None:
    """The bytes include device and host, which on the CPU are one memory; the disk is excluded."""
    engines: list[Engine] = []
    kept = allocated(lambda: engines.append(make_engine(case, Ranks(0, 1, CPU), tmp_path)), tmp_path).left
    (engine,) = engines
    batch = CaseBatch(case, 0, 0, CPU)

    def step() -> None:
        engine.train(batch, Training(100, RATE, stop=False), 1)
        engine.state.wait_for_updates()

    step()
    most = allocated(step, tmp_path).tensors
    crossing = engine.state.memory_report().pinned_arena
    engine.close()
    # Buffers of the threads that scale gradients are allocated at their first use.
    tiers = resident_bytes(case.layout, replace(sizes_of(case), threads=0), 0)
    peak = activation_peak(case.layout, sizes_of(case), 0, step_plan(case.layout)[0])
    # The pinned arena is not allocated by torch's allocator.
    assert kept + crossing == pytest.approx(tiers.device + tiers.host, rel=0.01)
    assert most == pytest.approx(peak.device, rel=0.1)


SPREAD = [
    *each(data=2, expert_ranks=2, drawn=EVEN, precision=["float32", "bfloat16"], micro_batches=6, homes="h"),
    Case(data=2, expert_ranks=2, drawn=EVEN, precision="float32", micro_batches=6, keep="All"),
    Case(data=2, expert_ranks=2, experts=4, prototypes=4, precision="float32", micro_batches=6, activation="SwiGLU"),
    *each(
        data=2,
        expert_ranks=2,
        drawn=EVEN,
        expert_groups=2,
        precision="float32",
        micro_batches=6,
        keep=["Inputs", "Products", "All"],
    ),
]
PIPELINES = [
    *each(pipeline=2, precision="float32", order=["Layered", "1F1B", "GPipe"], micro_batches=8),
    *each(pipeline=2, precision="float32", keep=["Products", "All"], order="1F1B", micro_batches=8),
]


LONG = json.dumps({"sequenceLength": 64})
IN_LAYERS: dict[str, Any] = {"drawn": LONG, "micro_batches": 2, "loss_chunk": 4}
"""With long sequences and a loss in small chunks, a layer's backward pass takes more memory than the head's."""
PARTS = [
    *each(data=2, context_ranks=2, **IN_LAYERS, precision="float32", keep=["Inputs", "Products", "All"]),
    Case(data=2, context_ranks=2, **IN_LAYERS, options="Llama3", precision="bfloat16"),
    Case(data=2, context_ranks=2, **IN_LAYERS, precision="float32", documents=True),
    Case(data=2, context_ranks=2, **IN_LAYERS, precision="float32", options="Mistral"),
    *each(data=2, context_ranks=2, sequence_chunks=3, **IN_LAYERS, precision="float32", options=["", "Mistral"]),
]
_ONE_KEY = {"heads": 4, "keyValueHeads": 1, "queryKeyNorm": "PerHead"}
ONE_KEY = json.dumps({"sequenceLength": 64, "attention": _ONE_KEY})
SLICES = [
    *each(data=2, tensor_ranks=2, **IN_LAYERS, precision="float32", keep=["Inputs", "Products", "All"]),
    *each(data=2, tensor_ranks=2, **IN_LAYERS, options=["Llama3", "Mistral"], precision="bfloat16"),
    Case(data=2, tensor_ranks=2, **IN_LAYERS, precision="float32", documents=True),
    *each(data=2, tensor_ranks=2, **(IN_LAYERS | {"drawn": ONE_KEY}), precision="float32", keep=["Inputs", "All"]),
]
SPREAD, PARTS, SLICES = (DEPTH.of(cases[::2], cases) for cases in (SPREAD, PARTS, SLICES))


def bytes_of_positions(case: Case, sizes: Sizes) -> int:
    """Return the bytes of the positions of documents on a CPU, of whole sequences and of parts of sequences. The
    prediction counts them on a GPU only."""
    length = sizes.model.sequence_length
    in_parts = length // case.context_ranks
    return case.micro_batches * sizes.micro_batch * (length + in_parts) * 8 if case.documents else 0


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[int]]:
    """Case -> peak bytes of each rank."""
    folder = tmp_path_factory.mktemp("peaks")
    cases = [*PIPELINES, *SPREAD, *PARTS, *SLICES]
    run_ranks(measure, 2, cases, folder)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {case: [of_rank[index] for of_rank in found] for index, case in enumerate(cases)}


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name)
def test_predicted_peak_equals_the_allocators_on_a_pipeline_rank(case: Case, peaks: dict[Case, list[int]]) -> None:
    """At the peak, consumed messages are freed and the next ones are already posted."""
    for rank, steps in enumerate(step_plan(case.layout)):
        assert peaks[case][rank] == pytest.approx(
            activation_peak(case.layout, sizes_of(case), rank, steps).device, rel=0.1
        )


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_predicted_peak_equals_the_allocators_with_expert_parallelism(case: Case, peaks: dict[Case, list[int]]) -> None:
    (steps,) = step_plan(case.layout)
    for most in peaks[case]:
        assert most == pytest.approx(activation_peak(case.layout, sizes_of(case), 0, steps).device, rel=0.12)


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.name)
def test_predicted_peak_is_an_upper_bound_with_context_ranks(case: Case, peaks: dict[Case, list[int]]) -> None:
    """Masks, and gradients of keys and values as they are summed, are counted for the worst rank and moment."""
    (steps,) = step_plan(case.layout)
    sizes = sizes_of(case)
    predicted = activation_peak(case.layout, sizes, 0, steps).device
    for most in peaks[case]:
        assert 0.6 * predicted <= most <= 1.02 * predicted + bytes_of_positions(case, sizes)


@pytest.mark.parametrize("case", SLICES, ids=lambda case: case.name)
def test_predicted_peak_is_an_upper_bound_with_tensor_ranks(case: Case, peaks: dict[Case, list[int]]) -> None:
    """Tensors of all ranks' tokens are counted as if all of them existed at the worst moment."""
    (steps,) = step_plan(case.layout)
    sizes = sizes_of(case)
    predicted = activation_peak(case.layout, sizes, 0, steps).device
    for most in peaks[case]:
        assert 0.5 * predicted <= most <= 1.02 * predicted + bytes_of_positions(case, sizes)


IN_MASKS: dict[str, Any] = IN_LAYERS | {"drawn": json.dumps({"sequenceLength": 256}), "homes": "h", "sequences": 1}
"""The masks of chunks are larger than all other tensors of a layer."""
ROUNDED = [
    *each(sequence_chunks=[2, 5], **IN_MASKS, precision="float32"),
    Case(sequence_chunks=4, **IN_LAYERS, precision="float32", documents=True),
    Case(sequence_chunks=4, **IN_LAYERS, precision="bfloat16", activation="SwiGLU"),
    Case(sequence_chunks=8, **IN_LAYERS, precision="float32", options="Llama3"),
    Case(sequence_chunks=8, **IN_LAYERS, precision="bfloat16", options="Mistral"),
    Case(sequence_chunks=4, **IN_LAYERS, precision="bfloat16", options="OLMo2"),
    *each(products=["Float8", "MXFP8"], sequence_chunks=8, **IN_LAYERS, precision=["float32", "bfloat16"]),
    *each(products="Float8", **IN_LAYERS, precision=["float32", "bfloat16"], homes="h"),
    *each(products="Float8", **IN_LAYERS, precision=["float32", "bfloat16"], keep="All", activation="SwiGLU"),
    *each(products="MXFP8", **IN_LAYERS, precision=["float32", "bfloat16"], homes="h", activation=["GELU", "SwiGLU"]),
]


@pytest.mark.parametrize("case", [*PARTS, *SLICES, *ROUNDED], ids=lambda case: case.name)
def test_the_peak_is_in_a_layer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the comparisons with the allocator would not notice a wrong layer."""
    (steps,) = step_plan(case.layout)
    predicted = activation_peak(case.layout, sizes_of(case), 0, steps)
    monkeypatch.setattr(AutogradMemory, "head_backward", 0)
    monkeypatch.setattr(AutogradMemory, "embedding_backward", 0)
    assert activation_peak(case.layout, sizes_of(case), 0, steps) == predicted


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_predicted_peak_is_an_upper_bound_with_rounded_operands_or_chunks(case: Case, tmp_path: Path) -> None:
    engine, batch = make_engine(case, Ranks(0, 1, CPU), tmp_path), CaseBatch(case, 0, 0, CPU)

    def step() -> None:
        engine.train(batch, Training(100, RATE, stop=False), 1)
        engine.state.wait_for_updates()

    step()
    most = allocated(step, tmp_path).tensors
    engine.close()
    sizes = sizes_of(case)
    predicted = activation_peak(case.layout, sizes, 0, step_plan(case.layout)[0]).device
    assert 0.6 * predicted <= most <= 1.02 * predicted + bytes_of_positions(case, sizes)
