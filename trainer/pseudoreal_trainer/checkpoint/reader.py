"""Reads tensors of a checkpoint, or ranges of them, wherever their pieces are. Knows arrays, not torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from pseudoreal_trainer.checkpoint.manifest import (
    MOMENTS_FILE,
    WEIGHTS_FILE,
    Link,
    Manifest,
    StoredTensor,
    entry_name,
)
from pseudoreal_trainer.checkpoint.storage.path import StoragePath
from pseudoreal_trainer.checkpoint.tensor_file import Array, TensorFile
from pseudoreal_trainer.checkpoint.visible import open_as_seen
from pseudoreal_trainer.plan.parts import by_expert
from pseudoreal_trainer.plan.units import Kind, are_experts, block_of, in_block, unit_of

_PORTION = 1 << 22
"""Elements of a tensor that are in memory at a time where it is read in portions."""


@dataclass(frozen=True)
class Reader:
    """Reads the tensors of a checkpoint. It trusts the files: `CheckpointStore.verify` is what compares them with their
    digests."""

    manifest: Manifest
    checkpoints: StoragePath
    """The folder of all checkpoints of the job."""
    awaits_files: bool = False
    """Whether other ranks have verified the files, so that one that this rank does not find will show."""

    @property
    def names(self) -> Iterator[str]:
        """Names of the tensors, as the model has them."""
        link, stored = self.manifest.link, self.manifest.tensors
        if link is None:
            yield from stored
            return
        yield from (name for name in stored if block_of(name) is None)
        for block, source in enumerate(link.blocks):
            yield from (in_block(name, block) for name in self._of_block[source] if not are_experts(name))
        for number, source in link.experts.items() or enumerate(link.blocks):
            yield from (in_block(name, number) for name in self._of_block[source] if are_experts(name))

    @property
    def dtype(self) -> str:
        """The type of all tensors, as numpy names it."""
        return next(iter(self.manifest.tensors.values())).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name)[1].shape

    def tensor(self, name: str, kind: Kind = "weights") -> Array:
        """A whole tensor. Raises KeyError when there is none with this name."""
        shape = self.shape(name)
        return self.read(name, kind, 0, prod(shape)).reshape(shape)

    def whole(self, kind: Kind = "weights") -> dict[str, Array]:
        """All tensors, in memory."""
        return {name: self.tensor(name, kind) for name in self.names}

    def updates(self, name: str) -> int:
        """Number of optimizer steps of a tensor's unit."""
        return self.manifest.updates.of(unit_of(name, self.manifest.model))

    def read(self, name: str, kind: Kind, begin: int, end: int) -> Array:
        """The elements begin..end-1 of the flattened tensor, in memory of their own."""
        source, tensor = self._stored(name)
        out = np.empty(end - begin, dtype=tensor.dtype)
        divisors = self._divisors(name, kind)
        if divisors == [0]:
            out[:] = 0
            return out
        pieces_of = Counter(piece.file for piece in tensor.pieces)
        for piece in tensor.pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                file, found = self._file(kind, piece.file), out[first - begin : last - begin]
                entry = entry_name(source, kind, piece.begin, is_alone=pieces_of[piece.file] == 1)
                file.read_into(entry, first - piece.begin, found)
        for number, elements in by_expert(begin, end, prod(tensor.shape) // len(divisors)):
            if divisors[number] != 1:
                out[elements.start - begin : elements.stop - begin] /= divisors[number]
        return out

    def portions(self, name: str, kind: Kind, begin: int, end: int) -> Iterator[Array]:
        """The same elements, some at a time: those of a tensor may be more than fit into the memory of a pod."""
        for first in range(begin, end, _PORTION):
            yield self.read(name, kind, first, min(end, first + _PORTION))

    def _stored(self, name: str) -> tuple[str, StoredTensor]:
        """The tensor's name in the files, and what the manifest says of it."""
        block, link = block_of(name), self.manifest.link
        source = name if block is None or link is None else in_block(name, link.source(name))
        return source, self.manifest.tensors[source]

    def _divisors(self, name: str, kind: Kind) -> list[float]:
        """What the tensor is divided by: one number for all of it, or one for each expert."""
        link: Link | None = self.manifest.link
        if link is None or kind == "weights" or block_of(name) is None:
            return [1]
        usual = [link.divisor_of(name, kind)]
        return usual if kind == "first_moment" else link.second_moment_divisors.get(self._stored(name)[0], usual)

    def _file(self, kind: Kind, number: int) -> TensorFile:
        pattern = WEIGHTS_FILE if kind == "weights" else MOMENTS_FILE
        name = pattern.format(number)
        if name not in self._files:
            path = self.checkpoints / self.manifest.data_folder / name
            is_late = self.awaits_files and isinstance(path, Path)  # object storage shows what it has
            self._files[name] = open_as_seen(path, lambda: TensorFile(path)) if is_late else TensorFile(path)
        return self._files[name]

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        return {}

    @cached_property
    def _of_block(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self.manifest.tensors:
            block = block_of(name)
            if block is not None:
                found.setdefault(block, []).append(name)
        return found
