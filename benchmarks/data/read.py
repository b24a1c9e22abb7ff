"""Turns of readers: `python -m benchmarks.data.read READER ...` imports the readers once, and forks a process for
each turn, which inherits nothing from earlier turns.

A turn is a line of JSON on stdin. The answer is a line with the result of `timed`, or null on failure. The program runs
in the environments of all readers, so it imports only numpy itself.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

SEED = 7
BATCH = 64
"""Windows requested at a time; a divisor of AT_ONCE, the number of windows that training orders at a time."""
_PROBES = 64
_PORTION = 1 << 24

Batch = NDArray[np.int32]
Take = Callable[[int, int], Batch]
"""Function that returns windows first..end-1 of the run, [end - first, width], as 32-bit numbers in memory of their
own, ready for conversion to a tensor."""


def main(readers: Sequence[str]) -> None:
    # Output printed by imports must not look like an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for reader in readers:
        for module in IMPORTS[reader]:
            importlib.import_module(module)
    for line in sys.stdin:
        in_a_fork(json.loads(line), answers)


def in_a_fork(turn: dict[str, Any], answers: TextIO) -> None:
    process = os.fork()
    if process == 0:
        try:
            answers.write(json.dumps(timed(turn)) + "\n")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(process, 0)[1]:
        answers.write("null\n")


def timed(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds to read the windows, a digest of their tokens, and the file's share in the page cache."""
    file, numbers = Path(turn["file"]), np.load(turn["numbers"])
    take = READERS[turn["reader"]](file, turn["width"], turn["first"], turn["windows"], numbers)
    (forget if turn["temperature"] == "cold" else remember)(file)
    in_memory = share_in_memory(file)
    seconds, digest = 0.0, 0
    for first in range(0, len(numbers), BATCH):
        begin = time.perf_counter()
        batch = take(first, min(first + BATCH, len(numbers)))
        seconds += time.perf_counter() - begin
        digest = (31 * digest + digest_of(batch)) % 2**63
    return {"seconds": seconds, "digest": digest, "in_memory": in_memory}


def digest_of(batch: Batch) -> int:
    """Return a sum that depends on each token and its place, modulo 2^64."""
    places = np.arange(1, batch.size + 1, dtype=np.uint64)
    return int((batch.ravel().astype(np.uint64) * places).sum(dtype=np.uint64))


def forget(file: Path) -> None:
    """Drop the file from the page cache. The pages must be on disk and not mapped by any process."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(file: Path) -> None:
    """Read the file into the page cache."""
    with file.open("rb", buffering=0) as opened:
        buffer = bytearray(_PORTION)
        while opened.readinto(buffer):
            pass


def share_in_memory(file: Path) -> float:
    """Return the share of sampled pages of the file that are in the page cache."""
    size, page, found = file.stat().st_size, bytearray(1), 0
    with file.open("rb", buffering=0) as opened:
        for place in range(_PROBES):
            try:
                found += os.preadv(opened.fileno(), [page], place * size // _PROBES, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
    return found / _PROBES


def ours(file: Path, width: int, _begin: int, _windows: int, numbers: NDArray[np.int64]) -> Take:
    reader = _our_reader(file)

    def take(first: int, end: int) -> Batch:
        found: Batch = reader.windows(numbers[first:end] * width, width)
        return found

    return take


def with_order(file: Path, width: int, begin: int, windows: int, _numbers: NDArray[np.int64]) -> Take:
    """Read with our reader, and compute the order of the windows, for many batches at a time as in training. Megatron
    looks the order up in an index built before training."""
    from pseudoreal_trainer.data.sources import AT_ONCE
    from pseudoreal_trainer.data.stream import shuffled

    reader, known = _our_reader(file), dict[int, NDArray[np.int64]]()

    def take(first: int, end: int) -> Batch:
        block = first // AT_ONCE
        if block not in known:
            known.clear()
            known[block] = shuffled(begin + np.arange(block * AT_ONCE, (block + 1) * AT_ONCE), windows, SEED)
        order = known[block][first % AT_ONCE :][: end - first]
        found: Batch = reader.windows(order * width, width)
        return found

    return take


def _our_reader(file: Path) -> Any:
    """Return our reader, which reads Megatron's file in place."""
    from pseudoreal_trainer.data.tokens.formats import token_files
    from pseudoreal_trainer.data.tokens.reader import TokenReader

    return TokenReader(token_files("Megatron", file.parent, file.name), 2**16)


def megatron(file: Path, width: int, _begin: int, _windows: int, numbers: NDArray[np.int64]) -> Take:
    """Read with Megatron's IndexedDataset and a memory map, its default. GPTDataset looks up the document parts of a
    window in its own indices; here the parts are computed beforehand at no cost. The parts are joined as in GPTDataset.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(file.with_suffix("")))
    ends = np.cumsum(dataset.sequence_lengths, dtype=np.int64)
    parts = [document_parts(ends, number * width, width) for number in numbers.tolist()]

    def take(first: int, end: int) -> Batch:
        batch = np.empty((end - first, width), np.int32)
        for row, window in zip(batch, parts[first:end], strict=True):
            found = [dataset.get(*part) for part in window]
            row[:] = found[0] if len(found) == 1 else np.concatenate(found)
        return batch

    return take


def megatron_long(file: Path, width: int, begin: int, windows: int, numbers: NDArray[np.int64]) -> Take:
    """Read the same tokens with an index of long documents."""
    return megatron(file.with_name("long.bin"), width, begin, windows, numbers)


def document_parts(ends: NDArray[np.int64], begin: int, count: int) -> list[tuple[int, int, int]]:
    """Return document, offset and length of each part of the tokens begin..begin+count-1. `ends` are the documents'
    ends."""
    parts = []
    document = int(np.searchsorted(ends, begin, side="right"))
    while count:
        offset = begin - (int(ends[document - 1]) if document else 0)
        here = min(count, int(ends[document]) - begin)
        parts.append((document, offset, here))
        document, begin, count = document + 1, begin + here, count - here
    return parts


def datatrove(file: Path, width: int, _begin: int, _windows: int, numbers: NDArray[np.int64]) -> Take:
    """Read with datatrove's DatatroveFileDataset, which nanotron uses for training."""
    from datatrove.utils.dataset import DatatroveFileDataset

    dataset = DatatroveFileDataset(str(file.with_suffix(".ds")), width - 1, token_size=2)

    def take(first: int, end: int) -> Batch:
        batch = np.empty((end - first, width), np.int32)
        for row, number in zip(batch, numbers[first:end].tolist(), strict=True):
            row[:] = dataset[number]["input_ids"].numpy()
        return batch

    return take


READERS: dict[str, Callable[[Path, int, int, int, NDArray[np.int64]], Take]] = {
    "pseudoreal": ours,
    "pseudoreal, with the order": with_order,
    "Megatron": megatron,
    "Megatron, long documents": megatron_long,
    "datatrove": datatrove,
}
IMPORTS: dict[str, Sequence[str]] = {
    "pseudoreal": ("pseudoreal_trainer.data.tokens.formats", "pseudoreal_trainer.data.tokens.reader"),
    "pseudoreal, with the order": ("pseudoreal_trainer.data.sources",),
    "Megatron": ("megatron.core.datasets.indexed_dataset",),
    "Megatron, long documents": (),
    "datatrove": ("datatrove.utils.dataset",),
}
"""Modules of each reader, imported before the turns; Megatron's take seconds."""

if __name__ == "__main__":
    main(sys.argv[1:])
