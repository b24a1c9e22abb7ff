"""Windows from object storage: a fake storage for many cases, and a real S3-compatible server."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.tokens import spans
from pseudoreal_trainer.data.tokens.megatron import megatron_files
from pseudoreal_trainer.data.tokens.native import native_files, verify
from pseudoreal_trainer.data.tokens.opening import token_files
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.data.tokens.runs import Run
from pseudoreal_trainer.data.tokens.spans import Blocks, ObjectSpans, Span
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.path import ObjectPath
from pseudoreal_trainer.storage.storage import storage_of

from tests.unit.trainer.data.support.written import write_native
from tests.unit.trainer.data.tokens.support.golden import FIVE, MEGATRON_INDEX
from tests.unit.trainer.storage.support.object_server import Bucket

BLOCK, AT_ONCE, MOST = 16, 5, 4
"""Bytes of a block, number of blocks requested at a time, and number of blocks cached."""


class _Storage:
    """Objects whose byte number i is (i * step) mod 251, and a record of the requests."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.contents = {run.file: _content(number, run.end) for number, run in enumerate(runs)}
        self.asked: list[list[tuple[str, int, int]]] = []

    def read_ranges(self, ranges: Sequence[tuple[ObjectPath, int, int]]) -> list[bytes]:
        self.asked.append([(path.url, begin, end) for path, begin, end in ranges])
        return [self.contents[path][begin:end] for path, begin, end in ranges]


def _content(number: int, size: int) -> bytes:
    return bytes(place * (number + 3) % 251 for place in range(size))


def _runs(*sizes: int) -> list[Run]:
    return [Run(ObjectPath(f"s3://b/{n}"), 0, np.dtype("u1"), size) for n, size in enumerate(sizes)]


RUNS = _runs(100, 33, 70)
Drawn = tuple[int, int, int]
"""Number of a run, first byte, number of bytes."""
drawn = st.tuples(st.integers(0, 2), st.integers(0, 32), st.integers(1, 80)).map(
    lambda one: (one[0], one[1], min(one[2], RUNS[one[0]].end - one[1]))
)


def _read(reader: ObjectSpans, drawn: list[Drawn]) -> bytes:
    """Return the concatenated bytes of the spans, which are requested in reverse order."""
    ats = [sum(size for _, _, size in drawn[:number]) for number in range(len(drawn) + 1)]
    buffer = bytearray(ats[-1])
    spans = [Span(run, begin, at, size) for (run, begin, size), at in zip(drawn, ats, strict=False)]
    reader.read_into(spans[::-1], memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> _Storage:
    storage = _Storage(RUNS)
    monkeypatch.setattr(spans, "_MOST_REQUESTED", AT_ONCE * BLOCK)
    monkeypatch.setattr(spans, "read_ranges", storage.read_ranges)
    return storage


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(drawn, max_size=6), max_size=4), st.integers(0, 5))
def test_blocks_in_a_cache_of_any_state_give_the_bytes(
    storage: _Storage, calls: list[list[Drawn]], overlap: int
) -> None:
    """Blocks are counted over all objects, as if these were contiguous."""
    storage.asked.clear()
    reader = ObjectSpans(RUNS, Blocks(BLOCK, overlap, MOST * BLOCK))
    for call in calls:
        expected = [_content(run, RUNS[run].end)[begin : begin + size] for run, begin, size in call]
        assert _read(reader, call) == b"".join(expected)
        assert sum(map(len, reader._blocks.values())) == reader._kept <= MOST * BLOCK
    firsts = {"s3://b/0": 0, "s3://b/1": 100, "s3://b/2": 133}
    for asked in storage.asked:
        assert len(set(asked)) == len(asked), "no block is requested twice at a time"
        assert all(begin == 0 or (firsts[url] + begin) % BLOCK == 0 for url, begin, _ in asked)
        assert all(end - begin <= BLOCK + overlap for _, begin, end in asked)


def test_missing_blocks_are_requested_together_and_known_ones_never(storage: _Storage) -> None:
    reader = ObjectSpans(RUNS, Blocks(BLOCK, 0, MOST * BLOCK))
    _read(reader, [(0, 10, 10), (1, 26, 3), (0, 0, 5)])
    assert storage.asked == [[("s3://b/0", 0, 16), ("s3://b/1", 12, 28), ("s3://b/1", 28, 33), ("s3://b/0", 16, 32)]]
    _read(reader, [(0, 20, 5)])
    assert storage.asked[1:] in ([], [[]])


def test_what_two_blocks_have_in_common_is_requested_with_either(storage: _Storage) -> None:
    reader = ObjectSpans(RUNS, Blocks(BLOCK, 2, MOST * BLOCK))
    assert _read(reader, [(0, 4, 14)]) == _content(0, 100)[4:18]
    assert _read(reader, [(0, 4, 15)]) == _content(0, 100)[4:19]
    assert storage.asked == [[("s3://b/0", 0, 18)], [("s3://b/0", 16, 34)]]


def test_an_object_that_is_cut_is_named(storage: _Storage) -> None:
    storage.contents[RUNS[1].file] = bytes(10)
    with pytest.raises(TrainingError, match=r"s3://b/1 of the token files has not the 33 bytes"):
        _read(ObjectSpans(RUNS), [(1, 0, 5)])


def test_native_files_in_a_bucket_are_those_on_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    documents = [np.arange(1, 900) * (number + 7) % 69_999 + 1 for number in range(50)]
    index = write_native(tmp_path, *[documents] * 3, vocabulary=70_000)
    shards = index.shards
    for path in tmp_path.iterdir():
        bucket.write(f"corpus/{path.name}", path.read_bytes())
    folder = ObjectPath(f"{bucket.url}/corpus")
    here, there = TokenReader(native_files(tmp_path), 70_000), TokenReader(native_files(folder), 70_000)
    starts = np.random.default_rng(3).integers(0, here.tokens - 1000, 40)
    starts[0] = shards[0].tokens - 400
    assert np.array_equal(there.windows(starts, 1000), here.windows(starts, 1000))
    verify(folder, index, shards[1])
    bucket.write("corpus/00001.bin", bytes(180_000))
    with pytest.raises(InvalidJobError, match=r"s3://.*00001.bin has the SHA-256"):
        verify(folder, index, shards[1])
    bucket.remove("corpus/00001.bin")
    with pytest.raises(InvalidJobError, match=r"s3://.*00001.bin is missing"):
        verify(folder, index, shards[1])
    with pytest.raises(TrainingError, match=r"an object of the token files is not there any more"):
        TokenReader(native_files(folder), 70_000).windows(np.array([shards[0].tokens]), 10)


def test_megatron_files_in_a_bucket(bucket: Bucket) -> None:
    bucket.write("X.idx", MEGATRON_INDEX)
    bucket.write("X.bin", FIVE)
    files = megatron_files([ObjectPath(f"{bucket.url}/X.bin")])
    assert TokenReader(files, 10).windows(np.array([1]), 3).tolist() == [[2, 3, 4]]


def test_a_folder_without_an_index_in_a_bucket_is_named(bucket: Bucket) -> None:
    with pytest.raises(InvalidJobError, match=r"s3://.*index.json is not there"):
        native_files(ObjectPath(bucket.url))


def test_files_in_a_bucket_are_found_by_a_pattern(bucket: Bucket) -> None:
    for key in ("b/X.bin", "a/Y.bin", "X.bin", "b/X.idx"):
        bucket.write(f"corpus/{key}", b"1")
    folder = ObjectPath(f"{bucket.url}/corpus")
    found = [str(path).removeprefix(f"{folder.url}/") for path in storage_of(folder).glob("**/*.bin")]
    assert found == ["X.bin", "a/Y.bin", "b/X.bin"]
    with pytest.raises(InvalidJobError, match=r"'\*\*/\*\.ds' matches no file below s3://"):
        token_files("Nanotron", folder, "**/*.ds")
