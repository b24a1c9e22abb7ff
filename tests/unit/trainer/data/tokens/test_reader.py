import errno
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.tokens import ranges
from pseudoreal_trainer.data.tokens.ranges import ByteRange, FileReader
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

from tests.support.depth import DEPTH

KINDS = ["<u2", ">u2", "<u4", "<i4", "<i8", "|u1"]


def _files(folder: Path, parts: list[tuple[int, int]], kind: str = "<u2") -> tuple[TokenFiles, list[int]]:
    """Write files from (number of tokens, number of unrelated bytes before them); return the files and all tokens."""
    runs, flat = [], list[int]()
    for number, (count, skipped) in enumerate(parts):
        tokens = [(len(flat) + place) * 7 % 251 for place in range(count)]
        path = folder / f"{number}"
        path.write_bytes(b"x" * skipped + np.array(tokens, kind).tobytes())
        runs.append(Run(path, skipped, np.dtype(kind), count))
        flat += tokens
    return TokenFiles(tuple(runs), ()), flat


parts = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=DEPTH.of(60, 1000))
@given(parts, st.sampled_from(KINDS), st.integers(1, 9), st.lists(st.integers(0, 99), max_size=12), st.integers(1, 4))
def test_windows_of_many_files_are_those_of_one_text(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[tuple[int, int]],
    kind: str,
    width: int,
    places: list[int],
    most_open: int,
) -> None:
    files, flat = _files(tmp_path_factory.mktemp("files"), parts, kind)
    starts = [place % (len(flat) - width + 1) for place in places] if len(flat) >= width else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_MOST_OPEN", most_open)
        reader = TokenReader(files, 251)
        found = reader.windows(np.array(starts, np.int64), width)
        reader.close()
    assert reader.tokens == len(flat)
    assert found.dtype == np.int32
    assert found.shape == (len(starts), width)
    assert found.tolist() == [flat[start : start + width] for start in starts]


def test_files_are_opened_when_they_are_needed_and_a_few_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_MOST_OPEN", 3)
    files, flat = _files(tmp_path, [(10, 0)] * 20)

    def opened() -> int:
        descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        links = [os.readlink(descriptor) for descriptor in descriptors if os.path.lexists(descriptor)]
        return sum(link.startswith(str(tmp_path)) for link in links)

    reader = TokenReader(files, 251)
    assert opened() == 0
    reader.windows(np.array([5]), 3)
    assert opened() == 1
    assert reader.windows(np.arange(190), 11).tolist() == [flat[start : start + 11] for start in range(190)]
    assert opened() == 3
    reader.close()
    assert opened() == 0


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (kind, wrong)
        for kind in ("<u2", "<i4", "<u4", "<i8")
        for wrong in (100, -1, 2**31 + 5, 2**32 + 5)
        if np.iinfo(kind).min <= wrong <= np.iinfo(kind).max
    ],
)
def test_a_token_outside_of_the_vocabulary_is_named(tmp_path: Path, kind: str, wrong: int) -> None:
    """No invalid number of any width is mistaken for a valid token."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(np.array([99] * 4, kind).tobytes())
    bad.write_bytes(np.array([1, 2, wrong, 3], kind).tobytes())
    runs = tuple(Run(path, 0, np.dtype(kind), 4) for path in (good, bad))
    reader = TokenReader(TokenFiles(runs, ()), 100)
    assert reader.windows(np.array([0, 1, 2]), 4).max() == 99
    with pytest.raises(TrainingError, match=rf"token 2 of {bad} is not below the vocabulary, which is 100"):
        reader.windows(np.array([0, 3]), 4)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    files, _ = _files(tmp_path, [(10, 0), (10, 0)])
    reader = TokenReader(files, 251)
    reader.windows(np.array([0, 10]), 10)
    os.truncate(tmp_path / "1", 10)
    assert reader.windows(np.array([10]), 5).shape == (1, 5)
    with pytest.raises(TrainingError, match=r"/1 of the token files has not the 20 bytes that it had when"):
        reader.windows(np.array([10]), 10)
    with pytest.raises(TrainingError, match=r"/1 of the token files has not the 20 bytes"):
        TokenReader(files, 251).windows(np.array([10]), 5)
    (tmp_path / "0").unlink()
    with pytest.raises(TrainingError, match=r"/0 of the token files is not there any more"):
        TokenReader(files, 251).windows(np.array([0]), 10)


def test_a_disk_that_fails_is_named_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = _files(tmp_path, [(10, 0)])

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TrainingError, match=r"/0 of the token files cannot be read: .*Input/output error"):
        TokenReader(files, 251).windows(np.array([0]), 10)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = _files(tmp_path, [(10, 0)])

    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(TrainingError, match=r"/0 of the token files cannot be opened: .*Too many open files"):
        TokenReader(files, 251).windows(np.array([0]), 10)


def _memory() -> int:
    """Return the resident bytes of this process, including mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_two_trillion_samples_need_no_memory(tmp_path: Path) -> None:
    """2e12 samples of 1,000 tokens: 1,000 files of 4 TB, all of them the same sparse file."""
    path, count = tmp_path / "sparse", 2 * 10**12
    with path.open("wb") as file:
        file.truncate(2 * count)
    run = Run(path, 0, np.dtype("<u2"), count)
    before = _memory()
    tracemalloc.start()
    reader = TokenReader(TokenFiles((run,) * 1000, ()), 2)
    assert reader.tokens == 2 * 10**15
    for seed in range(20):
        starts = np.random.default_rng(seed).integers(0, reader.tokens - 1001, 100)
        assert not reader.windows(starts, 1001).any()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.close()
    assert peak < 2 << 20
    assert _memory() - before < 20 << 20


class _Counted(FileReader):
    """Spans that count the bytes requested."""

    def __init__(self, runs: Any) -> None:
        super().__init__(runs)
        self.bytes = 0

    def read_into(self, ranges: Sequence[ByteRange], buffer: memoryview) -> None:
        self.bytes += sum(byte_range.size for byte_range in ranges)
        super().read_into(ranges, buffer)


def test_no_more_is_read_than_the_windows(tmp_path: Path) -> None:
    files, _ = _files(tmp_path, [(1000, 0), (1000, 3)])
    counted = _Counted(files.runs)
    TokenReader(files, 251, counted).windows(np.array([0, 990, 1500]), 20)
    assert counted.bytes == 3 * 20 * 2


@pytest.mark.parametrize("in_memory", [True, False])
def test_uncached_ranges_are_announced_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """Cached bytes are read with one call per window."""
    files, flat = _files(tmp_path, [(100, 0)])
    calls: list[str] = []
    read = os.preadv

    def preadv(descriptor: int, buffers: Any, begin: int, flags: int = 0) -> int:
        calls.append("look" if flags else "read")
        if flags and not in_memory:
            raise BlockingIOError
        return read(descriptor, buffers, begin)

    reader = TokenReader(files, 251)
    reader.windows(np.array([0]), 1)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: calls.append("announce"))
    assert reader.windows(np.array([20, 50]), 10).tolist() == [flat[20:30], flat[50:60]]
    assert calls == (["look"] * 2 if in_memory else ["look"] * 2 + ["announce"] * 2 + ["read"] * 2)


def test_files_of_two_widths_are_no_source(tmp_path: Path) -> None:
    runs = tuple(Run(tmp_path / kind, 0, np.dtype(kind), 4) for kind in ("u2", "u4"))
    with pytest.raises(InvalidJobError, match=r"/u4 has tokens of the dtype uint32, and .*/u2 of uint16; make them"):
        TokenFiles(runs, ())


def test_a_read_that_brings_less_than_was_asked_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a FUSE file system, or when a signal interrupts the read."""
    files, flat = _files(tmp_path, [(100, 3)])
    read = os.preadv

    def reads(file: int, views: Any, begin: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no reads from memory alone")
        return read(file, [views[0][:7]], begin)

    monkeypatch.setattr(os, "preadv", reads)
    reader = TokenReader(files, 2**16)
    assert reader.windows(np.array([5]), 80).tolist() == [flat[5:85]]
    reader.close()
