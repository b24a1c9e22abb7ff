"""Layouts and sizes for tests of the plan."""

from typing import Any

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Home, Sharing
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sizes import Device, Sizes, compute_bytes, master_bytes
from pseudoreal_trainer.plan.units import units_of


def make_layout(layers: int = 4, pipeline: int = 2, micro_batches: int = 2, **changes: Any) -> Layout:
    """Return a layout in which every layer owns its block, unless `changes` say otherwise."""
    fields: dict[str, Any] = {"layer_blocks": tuple(range(layers)), "data": 1} | changes
    return Layout(pipeline=pipeline, micro_batches=micro_batches, **fields)


def everywhere(home: Home, layers: int) -> tuple[Home, ...]:
    """Return the homes of the units of an unshared model, all equal to `home`."""
    return (home,) * (layers + 2)


def make_sizes(
    layers: int = 4,
    blocks: int | None = None,
    compute: str = "float32",
    micro_batch: int = 4,
    device: Device = "cpu",
    **model: Any,
) -> Sizes:
    fields = {
        "layers": layers,
        "hiddenSize": 32,
        "attention": {"heads": 2},
        "sequenceLength": 16,
        "feedForward": {"size": 96},
    } | model
    spec = Model.model_validate(fields)
    units = units_of(spec, Sharing(blocks=blocks or layers))
    return Sizes(spec, units, compute_bytes(compute), master_bytes(compute), micro_batch, device=device)
