"""The token files of datatrove, used by nanotron (Nanosets), read in place.

X.ds holds tokens alone, uint16 or uint32, little-endian. X.ds.metadata is text: `tokenizer|bytes of a token`, the
number of tokens, and the same number in readable form. X.ds.index holds the token offset of the end of each document,
uint64; windows do not need it. (datatrove, pipeline/tokens/tokenizer.py.)
"""

from typing import Any

import numpy as np

from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles, check_size, damaged, read_bytes, size_of
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

_TYPES: dict[str, np.dtype[Any]] = {"2": np.dtype("<u2"), "4": np.dtype("<u4")}
_ENDS = np.dtype("<u8")


def nanotron_files(tokens: list[StoragePath]) -> TokenFiles:
    """Return the files X.ds, each with X.ds.metadata beside it, and X.ds.index if it exists. Raises InvalidJobError if
    a file is missing or damaged."""
    runs = tuple(_run(path) for path in tokens)
    indices = [_beside(path, "index") for path in tokens]
    present = [index for index in indices if storage_of(index).exists()]
    for run, index in zip(runs, indices, strict=True):
        if index in present:
            _check_index(index, run)
    return TokenFiles(runs, (*(_beside(path, "metadata") for path in tokens), *present))


def _beside(tokens: StoragePath, ending: str) -> StoragePath:
    return tokens.parent / f"{tokens.name}.{ending}"


def _run(tokens: StoragePath) -> Run:
    path = _beside(tokens, "metadata")
    size_of(path, tokens)
    lines = storage_of(path).read().decode("utf-8", "replace").split("\n")
    _, bar, width = lines[0].rpartition("|")
    if not bar:
        raise InvalidJobError(
            f"{path} does not say how many bytes a token has: its first line is {lines[0][:100]!r}, as early releases"
            " of datatrove wrote it; append |2 (uint16) or |4 (uint32) to that line"
        )
    if width not in _TYPES or len(lines) < 2 or not lines[1].isdecimal():
        raise damaged(path, f"says {lines[:2]!r}, and not a tokenizer with |2 or |4 and then the number of tokens")
    run = Run(tokens, 0, _TYPES[width], int(lines[1]))
    check_size(tokens, run.end, path)
    return run


def _check_index(path: StoragePath, run: Run) -> None:
    """Check the size and the last entry."""
    size = size_of(path)
    if size % _ENDS.itemsize:
        raise damaged(path, f"has {size:,} bytes, and each entry has {_ENDS.itemsize}")
    last = int(np.frombuffer(read_bytes(path, size - 8, 8), _ENDS)[0]) if size else 0
    if last != run.count:
        raise damaged(path, f"says that documents end at token {last:,}, and {run.file.name} has {run.count:,} tokens")


def some_ends(tokens: StoragePath, most: int) -> list[int]:
    """Return the token offset of the end of at most `most` documents, spread evenly over the file; empty if there is no
    index."""
    path = _beside(tokens, "index")
    if not storage_of(path).exists():
        return []
    documents, width = size_of(path) // _ENDS.itemsize, _ENDS.itemsize
    count = min(most, documents)
    numbers = [number * documents // count for number in range(count)]
    return [int(np.frombuffer(read_bytes(path, number * width, width), _ENDS)[0]) for number in numbers]
