"""Writing the tensors of a checkpoint to plain files, without links, one chunk of a tensor at a time."""

from collections.abc import Callable, Iterable
from contextlib import closing
from math import prod
from typing import TypeVar

from pseudoreal_trainer.checkpoint.manifest import Manifest, Piece, StoredTensor
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.plan.parts import Part
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.storage.path import StoragePath

_T = TypeVar("_T")
Tracked = Callable[[Iterable[_T], str], Iterable[_T]]
"""A function that passes the elements of a loop through and shows its progress."""


def materialize(source: Reader, folder: StoragePath, tracked: Tracked[str]) -> Manifest:
    """Write all tensors to `folder` and return the manifest; the caller commits it."""
    names = list(source.names)
    parts = {name: _whole(name, source.shape(name)) for name in names}
    lacks = {name for name in names if not source.has_second_moment(name)}
    units = [[parts[name]] for name in names]
    with closing(RankWriter(folder, 0, units, source.dtype, uses_muon=bool(lacks))) as writer:
        for name in tracked(names, "writing"):
            for kind in KINDS if name not in lacks else KINDS[:-1]:
                for numbers in source.chunks(name, kind, 0, parts[name].end):
                    writer.write(kind, numbers)
        files = writer.finish()
    tensors = {
        name: StoredTensor(
            shape=part.shape,
            dtype=source.dtype,
            has_second_moment=name not in lacks,
            pieces=[Piece(file=0, begin=0, end=part.end)],
        )
        for name, part in parts.items()
    }
    return source.manifest.revised(link=None, files=files, tensors=tensors, files_version=None)


def _whole(name: str, shape: tuple[int, ...]) -> Part:
    return Part(name, shape, 0, prod(shape), 0)
