"""Checkpoints made by hand, without an engine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pseudoreal_trainer.checkpoint.manifest import Manifest, Piece, StoredTensor
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.plan.parts import Part
from pseudoreal_trainer.plan.units import KINDS


def save(store: CheckpointStore, manifest: Manifest, weights: Mapping[str, NDArray[Any]], pieces: int = 1) -> Manifest:
    """Each tensor in so many pieces; first moments are twice the weights, second moments four times. What is there
    already is replaced."""
    folder = store.begin(manifest)
    dtype = next(iter(weights.values())).dtype.name
    files: dict[str, Any] = {}
    for number in range(pieces):
        parts = {name: _part(name, array, number, pieces) for name, array in weights.items()}
        writer = RankWriter(folder, number, [[part] for part in parts.values()], dtype)
        for name, part in parts.items():
            for factor, kind in zip((1, 2, 4), KINDS, strict=True):
                writer.write(kind, np.ascontiguousarray(weights[name].flatten()[part.begin : part.end] * factor))
        files |= writer.finish()
    tensors = {
        name: StoredTensor(
            shape=array.shape,
            dtype=dtype,
            pieces=[
                Piece(file=n, begin=part.begin, end=part.end)
                for n in range(pieces)
                for part in [_part(name, array, n, pieces)]
            ],
        )
        for name, array in weights.items()
    }
    manifest = manifest.model_copy(update={"files": files, "tensors": tensors})
    store.commit(manifest)
    return manifest


def _part(name: str, array: NDArray[Any], number: int, pieces: int) -> Part:
    begin, end = (array.size * n // pieces for n in (number, number + 1))
    return Part(name, array.shape, begin, end, begin)
