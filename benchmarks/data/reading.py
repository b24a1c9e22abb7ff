"""Random windows of a large file: our reader beside Megatron's and datatrove's.

All readers read the same windows of the same bytes, in alternating turns, each turn in a process of its own.
"""

import json
import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, get_args

import numpy as np
from numpy.typing import NDArray
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.data.stream import shuffled
from pydantic import BaseModel

from benchmarks.data import child
from benchmarks.data.read import SEED
from benchmarks.data.results import DATATROVE, LOG, LONG, MEGATRON, ORDERED, OURS, Cell, Reading, Temperature
from benchmarks.data.same import check_equal

READERS = (OURS, ORDERED, MEGATRON, LONG, DATATROVE)
PACKAGES = ("megatron-core", "datatrove")
DOCUMENT_TOKENS = 1000
"""Average tokens of a document, about as many as in a web page; lengths are exponentially distributed."""
LONG_DOCUMENT_TOKENS = 1 << 20
"""Tokens of each long document. Almost every window is inside one document, Megatron's best case."""
VOCABULARY = 50_000
_PORTION = 1 << 25
"""Tokens generated at a time."""
_TYPE = np.dtype("<u2")


@dataclass(frozen=True)
class Size:
    file_tokens: int
    width: int
    """Tokens of a window, including the last target."""
    windows: dict[Temperature, int]
    rounds: int
    readers: tuple[str, ...] = READERS

    @property
    def file_windows(self) -> int:
        return self.file_tokens // self.width


FULL = Size(1 << 31, 4097, {"warm": 19_200, "cold": 1_280}, 5)
TINY = Size(3 << 20, 257, {"warm": 128, "cold": 128}, 2)


class Turn(BaseModel, frozen=True):
    reader: str
    temperature: Temperature
    round: int
    first: int
    """Number of the turn's first window in the common reading order."""
    count: int


class Order(BaseModel, frozen=True):
    """A turn and the inputs of its program."""

    reader: str
    temperature: Temperature
    file: str
    width: int
    first: int
    windows: int
    """Number of windows in the file."""
    numbers: str
    """File with the places of the windows to read."""


class Timed(BaseModel, frozen=True):
    seconds: float
    digest: int
    in_memory: float


def turns(size: Size) -> list[Turn]:
    """Return all turns in their order.

    Warm turns come first, right after the file was written. The readers of a round read the same windows, which no
    other round reads.
    """
    found: list[Turn] = []
    first = 0
    for temperature in get_args(Temperature):
        for number in range(size.rounds):
            count = size.windows[temperature]
            found += [
                Turn(reader=reader, temperature=temperature, round=number, first=first, count=count)
                for reader in size.readers
            ]
            first += count
    return found


def measure(folder: Path, tiny: bool) -> Reading:
    """Measure in `folder`, an empty folder with room for the file."""
    size = TINY if tiny else FULL
    if not child.READERS_PYTHON.exists():
        raise DevError(f"{child.READERS_PYTHON} is missing: `make bench-data` installs the readers of others there")
    file = folder / "tokens.bin"
    with progress.step(f"writing {size.file_tokens * _TYPE.itemsize / 2**30:.2g} GiB of tokens"):
        write_file(file, size.file_tokens)
    try:
        with _servers(size.readers) as servers:
            timed = [(turn, _timed(servers[turn.reader], turn, size, file)) for turn in _shown(turns(size))]
    finally:
        for name in (file, *links(file)):
            name.unlink()
    check_same_tokens(timed)
    return Reading(
        cells=cells(timed),
        file_bytes=size.file_tokens * _TYPE.itemsize,
        window=size.width,
        windows=size.windows,
        versions=_versions(),
    )


def cells(timed: Sequence[tuple[Turn, Timed]]) -> list[Cell]:
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn, found in timed:
        seconds.setdefault((turn.reader, turn.temperature), []).append(found.seconds)
    return [Cell(stack=reader, case=case, seconds=values) for (reader, case), values in seconds.items()]


def check_same_tokens(timed: Sequence[tuple[Turn, Timed]]) -> None:
    """Raise LossesDiffer if a reader has read other tokens than ours."""
    digests: dict[str, list[int]] = {}
    for turn, found in timed:
        digests.setdefault(turn.reader, []).append(found.digest)
    for reader, values in digests.items():
        check_equal(reader, values, OURS, digests[OURS])


def check_temperature(turn: Turn, in_memory: float) -> None:
    """Raise DevError if the file's presence in the page cache does not match the turn's temperature."""
    if turn.temperature == "cold" and in_memory > 0.05:
        raise DevError(f"{in_memory:.0%} of the file stay in memory: this file system does not forget them on request")
    if turn.temperature == "warm" and in_memory < 0.95:
        raise DevError(f"only {in_memory:.0%} of the file are in memory: there is too little of it, or others use it")


def _shown(planned: list[Turn]) -> Iterator[Turn]:
    for turn in planned:
        with progress.step(f"reading, {turn.temperature}, {turn.round + 1}: {turn.reader}"):
            yield turn


class _Server:
    """A process that runs the turns of some readers."""

    def __init__(self, python: Path, readers: Sequence[str], log: BinaryIO) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.data.read", *readers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | child.environment(1),
        )

    def ask(self, order: Order) -> Timed:
        """Run a turn. Raises DevError with the end of the log if the turn fails."""
        assert self._process.stdin is not None, "Popen was given stdin=PIPE"
        assert self._process.stdout is not None, "Popen was given stdout=PIPE"
        self._process.stdin.write(order.model_dump_json() + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "null")
        if answer is None:
            raise DevError(f"{order.reader} failed.\n{shell.tail(LOG)}")
        return Timed.model_validate(answer)

    def close(self) -> None:
        self._process.communicate()


@contextmanager
def _servers(readers: Sequence[str]) -> Iterator[dict[str, _Server]]:
    """Yield the process of each reader; the readers of other projects share one."""
    with shell.open_log(LOG) as log:
        ours = _Server(child.PYTHON, [reader for reader in readers if reader in (OURS, ORDERED)], log)
        others = _Server(child.READERS_PYTHON, [reader for reader in readers if reader not in (OURS, ORDERED)], log)
        try:
            yield {reader: ours if reader in (OURS, ORDERED) else others for reader in readers}
        finally:
            ours.close()
            others.close()


def _timed(server: _Server, turn: Turn, size: Size, file: Path) -> Timed:
    numbers = file.with_name("numbers.npy")
    np.save(numbers, shuffled(np.arange(turn.first, turn.first + turn.count), size.file_windows, SEED))
    order = Order(
        reader=turn.reader,
        temperature=turn.temperature,
        file=str(file.resolve()),
        width=size.width,
        first=turn.first,
        windows=size.file_windows,
        numbers=str(numbers.resolve()),
    )
    found = server.ask(order)
    check_temperature(turn, found.in_memory)
    return found


def _versions() -> dict[str, str]:
    program = f"from importlib.metadata import version; print(*map(version, {PACKAGES}))"
    found = shell.output([child.READERS_PYTHON, "-c", program]).split()
    return dict(zip(PACKAGES, found, strict=True))


def write_file(file: Path, tokens: int) -> None:
    """Write X.bin with random tokens and X.idx for Megatron, and link the same tokens under other names for the other
    readers."""
    random = np.random.default_rng(SEED)
    with file.open("wb") as opened:
        for begin in range(0, tokens, _PORTION):
            opened.write(random.integers(0, VOCABULARY, min(_PORTION, tokens - begin), dtype=_TYPE).data)
        os.fsync(opened.fileno())
    for link in links(file):
        os.link(file, link)
    long = np.arange(LONG_DOCUMENT_TOKENS, tokens, LONG_DOCUMENT_TOKENS)
    file.with_suffix(".idx").write_bytes(megatron_index(usual_ends(tokens), tokens))
    file.with_name("long.idx").write_bytes(megatron_index(long, tokens))


def links(file: Path) -> list[Path]:
    """Return the other names of the file: one with an index of long documents for Megatron, one for datatrove."""
    return [file.with_name("long.bin"), file.with_suffix(".ds")]


def usual_ends(tokens: int) -> NDArray[np.int64]:
    """Return the ends of documents of the usual lengths, without the last one, which ends with the tokens."""
    random = np.random.default_rng(SEED)
    count = 2 * tokens // DOCUMENT_TOKENS + 100
    ends = np.cumsum(1 + random.exponential(DOCUMENT_TOKENS, count).astype(np.int64))
    assert ends[-1] > tokens
    return ends[ends < tokens]


def megatron_index(ends: NDArray[np.int64], tokens: int) -> bytes:
    """Return the `.idx` of `tokens` tokens of two bytes. `ends` has the ends of all documents but the last."""
    begins = np.concatenate([np.zeros(1, np.int64), ends])
    lengths = np.diff(np.append(begins, tokens)).astype("<i4")
    documents = np.arange(len(begins) + 1, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(begins), len(documents))
    pointers = (begins * _TYPE.itemsize).astype("<i8")
    return b"".join([header, lengths.tobytes(), pointers.tobytes(), documents.tobytes()])
