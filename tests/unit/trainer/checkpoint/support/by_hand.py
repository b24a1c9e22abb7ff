"""Checkpoints written by hand, without an engine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import JobIdentity
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.manifest import Manifest, Piece, Random, StoredTensor
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.plan.parts import Part
from pseudoreal_trainer.plan.units import KINDS


def manifest_of(step: int, phase: str = "pseudo", uid: str = "u1", **changes: Any) -> Manifest:
    """Return a manifest without tensors and files."""
    manifest = Manifest(
        job=JobIdentity(name="tiny", namespace="default", uid=uid),
        execution=1,
        phase=phase,
        phase_index=("pseudo", "real").index(phase),
        model=Model.model_validate(
            {"layers": 2, "hiddenSize": 4, "attention": {"heads": 1}, "sequenceLength": 4, "feedForward": {"size": 4}}
        ),
        sharing=Sharing(blocks=1),
        random=Random(seed=0),
        corpus=CorpusIdentity(files=1, size=5, sha256="07" * 32),
        step=step,
        tokens=step * 8,
        global_cursor=step * 2,
        phase_complete=False,
        delinked=False,
    )
    return manifest.model_copy(update=changes)


def committed(store: CheckpointStore, step: int, phase: str = "pseudo", uid: str = "u1") -> Manifest:
    """Commit a checkpoint of one small tensor."""
    return save(store, manifest_of(step, phase, uid), {"norm.weight": np.full(3, step, np.float32)})


def save(store: CheckpointStore, manifest: Manifest, weights: Mapping[str, NDArray[Any]], pieces: int = 1) -> Manifest:
    """Commit a checkpoint with each tensor cut into `pieces` pieces; first moments are twice the weights, second
    moments four times. An existing checkpoint of this name is replaced."""
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
