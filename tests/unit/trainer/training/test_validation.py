"""Validation gives the same bits for every number of windows per pass, and needs no more memory than a
training step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import evaluation_plan, step_plan
from pseudoreal_trainer.plan.memory.activations import activation_peak, evaluation_peak, sequences_at_once
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.training.validation import Validation

from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import make_engine
from tests.unit.trainer.plan.memory.support.allocations import allocated

ONE_RANK = Ranks(0, 1, torch.device("cpu"))
CASES = [
    Case(precision="float32"),
    Case(precision="float32", micro_batches=1),
    Case(precision="float32", order="1F1B", micro_batches=6, homes="h"),
    Case(precision="float32", keep="All", micro_batches=3),
    Case(precision="bfloat16", activation="SwiGLU", homes="hd", stash=True),
]


def _sizes(case: Case, layers: int, micro_batch: int) -> Sizes:
    model = case.model.model_copy(update={"layers": layers})
    return Sizes(model, units_of(model, case.sharing), compute_bytes=4, master_bytes=4, micro_batch=micro_batch)


def _windows(count: int, sequence: int) -> Any:
    return np.random.default_rng(5).integers(0, 256, (count, sequence + 1), dtype=np.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_validation_loss_does_not_depend_on_windows_at_once(case: Case, tmp_path: Path) -> None:
    engine = make_engine(case, ONE_RANK, tmp_path)
    windows = _windows(17, case.model.sequence_length)
    found = {Validation(windows, at_once).measure(engine) for at_once in (1, 2, 7, 17, 64)}
    engine.close()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("case", "count"), [*((case, 40) for case in CASES), (CASES[1], 600)], ids=lambda value: getattr(value, "name", "")
)
def test_validation_takes_no_more_memory_than_a_planned_step(case: Case, count: int, tmp_path: Path) -> None:
    """Not part of the plan: token ids of as many windows as a step has sequences, and one number per window."""
    sizes = _sizes(case, case.layers, 4)
    if case.precision == "bfloat16":
        sizes = replace(sizes, compute_bytes=2)
    room = activation_peak(case.layout, sizes, 0, step_plan(case.layout)[0]).device
    engine = make_engine(case, ONE_RANK, tmp_path)
    validation = Validation(_windows(count, case.model.sequence_length), sequences_at_once(case.layout, sizes))
    validation.measure(engine)
    most = allocated(lambda: validation.measure(engine), tmp_path).tensors
    engine.close()
    assert most <= room + 8 * (3 * 4 * case.micro_batches * (case.model.sequence_length + 1) + 3 * count)


layouts = st.builds(
    lambda layers, pipeline, data, micro_batches, order, keep, stash: Layout(
        layer_blocks=tuple(range(layers * pipeline)),
        pipeline=pipeline,
        data=data,
        micro_batches=micro_batches * pipeline,
        order=order,
        keep=keep,
        stash=stash and keep == "Inputs",
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["Layered", "GPipe", "1F1B", "Interleaved"]),
    st.sampled_from(["Inputs", "Products", "All"]),
    st.booleans(),
)


@settings(deadline=None)
@given(layouts, st.integers(1, 9))
def test_windows_at_once_are_the_most_that_fit_into_the_memory_of_a_step(layout: Layout, width: int) -> None:
    sizes = _sizes(Case(layers=layout.layers), layout.layers, width * layout.data)
    found = sequences_at_once(layout, sizes)

    def fits(sequences: int) -> bool:
        return all(
            evaluation_peak(layout, sizes, evaluated) <= activation_peak(layout, sizes, rank, trained).device
            for rank, (evaluated, trained) in enumerate(
                zip(evaluation_plan(replace(layout, micro_batches=sequences)), step_plan(layout), strict=True)
            )
        )

    assert fits(found)
    assert found == width * layout.micro_batches or not fits(found + 1)
