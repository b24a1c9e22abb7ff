"""Checkpoints of jobs that round moments, to bfloat16 or to 8-bit floats in blocks: stored in bfloat16, read in the
dtype of the weights, and loaded by jobs that keep their moments in another format."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.materialize import materialize
from pseudoreal_trainer.checkpoint.origin import Resumed
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorFile
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.blocks import BLOCKS, unpacked
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.plan.units import KINDS, Kind
from pseudoreal_trainer.training.start import fill, open_engine

from tests.support.checkpoints import newest
from tests.support.rounding import in_blocks

UID = "11111111-2222"
Train = Callable[[PhaseConfig], object]


@pytest.fixture
def saved(job_body: dict[str, Any], tmp_path: Path, config: Any, train: Train) -> Callable[[str, str], Reader]:
    """Function that trains the first phase with such moments and compute dtype, and returns the last checkpoint."""

    def run(moments: str, compute: str) -> Reader:
        job_body["spec"]["optimizer"] = {"moments": moments}
        job_body["spec"]["precision"] = {"compute": compute}
        train(config(0))
        return newest(CheckpointStore(tmp_path / "work", UID), "pseudo")

    return run


def _loaded(config: PhaseConfig, checkpoint: Reader) -> dict[tuple[int, str], torch.Tensor]:
    """Return (unit, kind) -> state of an engine that resumes from the checkpoint."""
    with open_engine(config, phase_layout(config, "cpu"), Ranks(0, 1, torch.device("cpu"))) as engine:
        fill(engine, config, Resumed(checkpoint))
        states = engine.state._store.states
        return {
            (unit, kind): _numbers(state.part(kind, 0, engine.units[unit].numel), kind, engine.units[unit].numel)
            for unit, state in states.items()
            for kind in KINDS
        }


def _numbers(stored: torch.Tensor, kind: Kind, elements: int) -> torch.Tensor:
    return unpacked(kind, stored, elements) if stored.dtype == BLOCKS else stored.clone()


def _is_representable(values: np.ndarray) -> bool:
    numbers = torch.from_numpy(values)
    return bool((numbers.bfloat16().to(numbers.dtype) == numbers).all())


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("moments", ["BFloat16", "Float8"])
def test_moments_are_stored_in_two_bytes_and_read_in_the_dtype_of_the_weights(
    saved: Callable[[str, str], Reader], moments: str, compute: str
) -> None:
    reader = saved(moments, compute)
    folder, names = reader.checkpoints / reader.manifest.data_folder, [*reader.names]
    of_weights, of_moments = (TensorFile(folder / f"{kind}-00000.safetensors") for kind in ("weights", "moments"))
    for name in names:
        tensor = reader.manifest.tensors[name]
        assert (tensor.dtype, tensor.moment_dtype) == (compute, "bfloat16")
        assert of_weights.form(name).dtype == compute
        for kind in KINDS[1:]:
            assert of_moments.form(f"{name}.{kind}") == Form(tensor.shape, "bfloat16")
            found = reader.tensor(name, kind)
            assert found.dtype.name == compute
            assert _is_representable(found)
    assert any(reader.tensor(name, "second_moment").any() for name in names)
    first = names[0]
    whole = reader.tensor(first, "first_moment").flatten()
    assert np.array_equal(reader.read(first, "first_moment", 3, 11), whole[3:11])


def test_moments_of_master_weights_leave_the_manifest_as_it_was(saved: Callable[[str, str], Reader]) -> None:
    reader = saved("Master", "float32")
    assert all(tensor.moment_dtype is None for tensor in reader.manifest.tensors.values())
    assert "momentDtype" not in reader.manifest.to_json()


@pytest.mark.parametrize(("before", "after"), [*product(["Master", "BFloat16", "Float8"], repeat=2)][1:])
def test_a_job_loads_moments_of_another_format(
    before: str, after: str, saved: Callable[[str, str], Reader], job_body: Any, config: Any
) -> None:
    """Rounded to the nearest, so in every layout alike. Numbers that the format has are loaded exactly: bfloat16 has
    all numbers of blocks."""
    reader = saved(before, "float32")
    job_body["spec"]["optimizer"] = {"moments": "Master"}
    expected = _loaded(config(0), reader)
    job_body["spec"]["optimizer"] = {"moments": after}
    found = _loaded(config(0), reader)
    for (unit, kind), values in found.items():
        exact = expected[unit, kind]
        if after == "Master" or kind == "weights" or before in ("Float8", after):
            assert values.float().equal(exact)
        elif after == "BFloat16":
            assert values.equal(exact.bfloat16())
        else:
            assert values.float().equal(in_blocks(exact, None, has_sign=kind == "first_moment"))


@pytest.mark.parametrize("state", ["Copy", "Scale", "Measured", "Reset"])
@pytest.mark.parametrize("moments", ["BFloat16", "Float8"])
def test_a_delink_divides_rounded_moments_exactly(
    moments: str, state: str, saved: Callable[[str, str], Reader], job_body: Any, delink_of: Any, tmp_path: Path
) -> None:
    """The link has the divisors; moments are rounded again only when a phase loads them. Materialized files have the
    dtype of the weights, and so the same values."""
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 1}
    job_body["spec"]["delink"] = {"optimizerState": state}
    source = saved(moments, "float32")
    delink(delink_of(1))
    target = newest(CheckpointStore(tmp_path / "work", UID), "real")
    assert target.manifest.link is not None
    folder = tmp_path / "plain" / target.manifest.name
    folder.mkdir(parents=True)
    plain = Reader(materialize(target, folder, lambda names, _: names), folder.parent)
    for name in target.names:
        stored = target._stored(name)[0]
        for kind in KINDS[1:]:
            (divisor,) = target._divisors(name, kind)
            values = source.tensor(stored, kind)
            expected = values / np.float32(divisor) if divisor else np.zeros_like(values)
            assert np.array_equal(target.tensor(name, kind), expected)
            assert np.array_equal(plain.tensor(name, kind), expected)


@pytest.mark.parametrize(
    ("moments", "claimed", "error"),
    [
        ("BFloat16", None, "is BF16 in its file, not float32"),
        ("Master", "bfloat16", "is F32 in its file, not bf"),
    ],
)
def test_moments_of_another_dtype_than_the_manifest_says_are_rejected(
    moments: str, claimed: str | None, error: str, saved: Callable[[str, str], Reader]
) -> None:
    reader = saved(moments, "float32")
    name = next(iter(reader.names))
    other = reader.manifest.tensors[name].model_copy(update={"moment_dtype": claimed})
    wrong = Reader(reader.manifest.model_copy(update={"tensors": {name: other}}), reader.checkpoints)
    with pytest.raises(ValueError, match=error):
        wrong.tensor(name, "first_moment")
