"""Reader for the tensors of a checkpoint, or ranges of them, across the files that hold their pieces. Uses numpy
arrays, not torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from pseudoreal_trainer.checkpoint import format_4
from pseudoreal_trainer.checkpoint.manifest import (
    MOMENTS_FILE,
    WEIGHTS_FILE,
    Link,
    Manifest,
    StoredTensor,
    entry_name,
    of_kind,
)
from pseudoreal_trainer.checkpoint.precision import Array
from pseudoreal_trainer.checkpoint.slices import read_in_slice
from pseudoreal_trainer.checkpoint.tensor_file import TensorFile
from pseudoreal_trainer.checkpoint.visibility import open_when_visible
from pseudoreal_trainer.plan.parts import by_expert
from pseudoreal_trainer.plan.units import Kind, are_experts, block_of, has_expert_rows, in_block, unit_of
from pseudoreal_trainer.storage.path import StoragePath

_CHUNK = 1 << 22
"""Number of elements in a chunk of a tensor."""


@dataclass(frozen=True)
class Reader:
    """Reader for the tensors of one checkpoint. The files are trusted; `CheckpointStore.verify` compares them with
    their digests."""

    manifest: Manifest
    checkpoints: StoragePath
    """Folder of all checkpoints of the job."""
    awaits_files: bool = False
    """True if other ranks have verified the files: wait for a file that this rank does not see yet."""

    @property
    def names(self) -> Iterator[str]:
        """Names of the tensors, as in the model."""
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
        """Numpy name of the dtype of all tensors. Moments in bfloat16 are read in this dtype, too."""
        return next(iter(self.manifest.tensors.values())).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        stored, experts = self._stored(name)[1].shape, self.manifest.model.experts
        if self.manifest.link is None or experts is None or not has_expert_rows(name):
            return stored
        return experts.count, *stored[1:]

    def first_copy(self, name: str) -> int:
        """Return the first row of the tensor, in its first dimension, with the weights of another row or tensor before
        it; the number of rows if there is none."""
        link = self.manifest.link
        if link is None or block_of(name) is None or link.is_zero(name):
            return self.shape(name)[0]
        return 0 if link.is_copy(name) else self._stored(name)[1].shape[0]

    def has_second_moment(self, name: str) -> bool:
        return self._stored(name)[1].has_second_moment

    def tensor(self, name: str, kind: Kind = "weights") -> Array:
        """Return a whole tensor. Raises KeyError if no tensor has this name."""
        shape = self.shape(name)
        return self.read(name, kind, 0, prod(shape)).reshape(shape)

    def whole(self, kind: Kind = "weights") -> dict[str, Array]:
        """Return all tensors, in memory."""
        return {name: self.tensor(name, kind) for name in self.names}

    def updates(self, name: str) -> int:
        """Return the number of optimizer steps of the tensor's unit."""
        return self.manifest.updates.of(unit_of(name, self.manifest.model))

    def read(self, name: str, kind: Kind, begin: int, end: int, column_slices: int = 1) -> Array:
        """Return elements begin..end-1 of the flattened tensor, in newly allocated memory. `column_slices`: number of
        slices of columns; the indices count the elements of one slice after the other, and the range is in one
        slice."""
        stored = self._stored(name)[1]
        if column_slices != stored.column_slices:
            if column_slices > 1:
                rows = partial(self.read, name, kind)
                return read_in_slice(rows, stored.shape, column_slices, begin, end)
            return self._read_rows(name, kind, begin, end)
        size = prod(stored.shape)
        if end <= size:
            return self._read_stored(name, kind, begin, end)
        # The model has more experts than the files: their rows repeat.
        cuts = [begin, *range((begin // size + 1) * size, end, size), end]
        return np.concatenate(
            [self._read_stored(name, kind, first % size, (last - 1) % size + 1) for first, last in pairwise(cuts)]
        )

    def _read_rows(self, name: str, kind: Kind, begin: int, end: int) -> Array:
        """Return elements begin..end-1 of a flattened tensor from files with slices of its columns."""
        stored = self._stored(name)[1]
        rows, columns = stored.shape
        first, last, width = begin // columns, -(-end // columns), columns // stored.column_slices
        whole = np.empty((last - first, columns), stored.dtype)
        for column in range(0, columns, width):
            start = rows * column
            part = self._read_stored(name, kind, start + first * width, start + last * width)
            whole[:, column : column + width] = part.reshape(-1, width)
        return whole.reshape(-1)[begin - first * columns : end - first * columns]

    def _read_stored(self, name: str, kind: Kind, begin: int, end: int) -> Array:
        """Return elements begin..end-1 in the order of the files."""
        source, tensor = self._stored(name)
        out = np.empty(end - begin, dtype=tensor.dtype)
        divisors = self._divisors(name, kind)
        if not any(divisors) or (kind == "second_moment" and not tensor.has_second_moment):
            out[:] = 0
            return out
        dtype = tensor.dtype if kind == "weights" else tensor.moment_dtype or tensor.dtype
        pieces_of = Counter(piece.file for piece in tensor.pieces)
        for piece in tensor.pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                file, found = self._file(kind, piece.file), out[first - begin : last - begin]
                if self.manifest.files_version == format_4.VERSION and are_experts(source):
                    entry = of_kind(format_4.entry_name(source, piece.begin // prod(tensor.shape[1:])), kind)
                else:
                    entry = entry_name(source, kind, piece.begin, is_alone=pieces_of[piece.file] == 1)
                if dtype == tensor.dtype:
                    file.read_into(entry, first - piece.begin, found)
                else:
                    # In chunks: widening takes memory for copies.
                    for start in range(0, len(found), _CHUNK):
                        part = found[start : start + _CHUNK]
                        part[:] = file.read_narrow(entry, dtype, first - piece.begin + start, len(part))
        for number, elements in by_expert(begin, end, prod(tensor.shape) // len(divisors)):
            part, divisor = out[elements.start - begin : elements.stop - begin], divisors[number]
            if divisor == 0:
                part[:] = 0
            elif divisor != 1:
                part /= divisor
        return out

    def chunks(self, name: str, kind: Kind, begin: int, end: int) -> Iterator[Array]:
        """Yield the elements begin..end-1 in chunks: a whole tensor may be larger than the memory of a pod."""
        for first in range(begin, end, _CHUNK):
            yield self.read(name, kind, first, min(end, first + _CHUNK))

    def _stored(self, name: str) -> tuple[str, StoredTensor]:
        """Return the tensor's name in the files, and its entry in the manifest."""
        block, link = block_of(name), self.manifest.link
        source = name if block is None or link is None else in_block(name, link.source(name))
        return source, self.manifest.tensors[source]

    def _divisors(self, name: str, kind: Kind) -> list[float]:
        """Return the divisors of the stored values: one number for the whole tensor, or one for each expert."""
        link: Link | None = self.manifest.link
        if link is None or block_of(name) is None:
            return [1]
        if kind == "weights":
            return [0 if link.is_zero(name) else 1]
        usual = [link.divisor_of(name, kind)]
        return usual if kind == "first_moment" else link.second_moment_divisors.get(self._stored(name)[0], usual)

    def _file(self, kind: Kind, number: int) -> TensorFile:
        pattern = WEIGHTS_FILE if kind == "weights" else MOMENTS_FILE
        name = pattern.format(number)
        if name not in self._files:
            path = self.checkpoints / self.manifest.data_folder / name
            is_late = self.awaits_files and isinstance(path, Path)  # object storage is read-after-write consistent
            self._files[name] = open_when_visible(path, lambda: TensorFile(path)) if is_late else TensorFile(path)
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
