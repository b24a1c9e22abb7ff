"""The order of sources on object storage, compared with a slow reference, and the bytes that it requests."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.spec.phase import Batch
from pseudoreal_trainer.data.block_order import BlockOrder, groups_of, order_of_objects, shuffled_by_blocks
from pseudoreal_trainer.data.order import continued, stretch
from pseudoreal_trainer.data.sources import MixedStream, Source, blocks_of, open_source
from pseudoreal_trainer.data.stream import rank_parts
from pseudoreal_trainer.data.tokens import spans
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles
from pseudoreal_trainer.data.tokens.spans import ObjectSpans
from pseudoreal_trainer.storage.path import ObjectPath

from tests.support.depth import DEPTH
from tests.unit.trainer.data.support.slow_permutation import permuted

VECTORS = {
    (26, 4, 3, (0,)): [14, 4, 18, 13, 12, 16, 7, 15, 17, 6, 5, 19, 10, 23, 21, 9, 20, 0, 25, 3, 22, 8, 2, 24, 11, 1],
    (26, 4, 3, (5, 9)): [12, 14, 9, 13, 15, 7, 11, 4, 8, 5, 6, 10, 2, 3, 22, 16, 24, 25, 23, 20, 21, 19, 1, 18, 17, 0],
}
"""From the slow implementation."""
orders = st.builds(
    lambda windows, group: BlockOrder(windows=windows, group=group), st.integers(1, 9), st.integers(1, 9)
)


def _slow(number: int, samples: int, order: BlockOrder, *key: int) -> int:
    """Reference for the order in docs/checkpoint-format.md: one number at a time, with Python's integers."""
    windows, group = order.windows, order.group
    epoch, position = divmod(number, samples)
    whole = samples // windows
    last = max(1, -(-whole // group)) - 1
    here = min(position // (windows * group), last)
    begin = here * windows * group
    size = samples - begin if here == last else windows * group
    slot = begin + permuted(position - begin, size, key[0], epoch, *key[1:], 2, here)
    block, inside = divmod(slot, windows)
    return slot if block >= whole else permuted(block, whole, key[0], epoch, *key[1:], 1) * windows + inside


@settings(deadline=None, max_examples=DEPTH.of(40, 1000))
@given(st.integers(1, 150), orders, st.integers(0, 2**31), st.integers(0, 3))
def test_an_epoch_is_each_window_once(samples: int, order: BlockOrder, seed: int, epoch: int) -> None:
    numbers = np.arange(epoch * samples, (epoch + 1) * samples)
    found = shuffled_by_blocks(numbers, samples, order, seed, 7)
    assert sorted(found.tolist()) == list(range(samples))
    for rows, at, _ in groups_of(numbers, samples, order):
        assert at == epoch
        blocks = {*(found[rows] // order.windows).tolist()} - {samples // order.windows}
        assert len(blocks) <= order.group, "a cache of a group suffices"


@settings(deadline=None)
@given(st.integers(1, 10**12), orders, st.integers(0, 2**31), st.lists(st.integers(0, 10**13), min_size=1, max_size=6))
def test_each_entry_is_what_the_slow_one_says(samples: int, order: BlockOrder, seed: int, numbers: list[int]) -> None:
    """An entry does not depend on the other numbers in the call."""
    found = shuffled_by_blocks(np.array(numbers), samples, order, seed, 3)
    assert found.tolist() == [_slow(number, samples, order, seed, 3) for number in numbers]


def test_its_vectors_are_fixed() -> None:
    for (samples, windows, group, key), expected in VECTORS.items():
        order = BlockOrder(windows=windows, group=group)
        assert shuffled_by_blocks(np.arange(samples), samples, order, *key).tolist() == expected
    numbers = np.array([0, 1, 2047, 2048, 10**9 + 6, 10**9 + 7])
    found = shuffled_by_blocks(numbers, 10**9 + 7, BlockOrder(windows=8, group=256), 3, 77)
    assert found.tolist() == [79643981, 596071471, 636147638, 250796127, 396855446, 917908982]


def test_blocks_of_a_group_are_from_all_over_the_source_and_mixed() -> None:
    order, samples = BlockOrder(windows=8, group=256), 1_000_000
    first = shuffled_by_blocks(np.arange(order.size), samples, order, 0)
    blocks = first // 8
    assert len({*blocks.tolist()}) == 256
    assert np.histogram(blocks, bins=8, range=(0, samples // 8))[0].min() > 8 * 10
    assert len({*blocks[:1024].tolist()}) > 0.9 * 256, "half of a group has windows of nearly all its blocks"
    second = shuffled_by_blocks(np.arange(samples, samples + order.size), samples, order, 0)
    assert len({*first.tolist()} & {*second.tolist()}) < 0.05 * order.size, "another epoch has other groups"


@pytest.mark.parametrize(
    ("window", "windows", "group"),
    [(8192, 8, 256), (65_536, 1, 256), (131_072, 1, 128), (24, 2730, 256), (2**25, 1, 1)],
)
def test_blocks_are_as_large_as_requests_and_groups_as_the_cache(window: int, windows: int, group: int) -> None:
    assert order_of_objects(window) == BlockOrder(windows=windows, group=group)


T, SEED = 16, 4
ORDER = BlockOrder(windows=4, group=8)
"""Blocks of 128 bytes; the cache holds 8 of them."""
COUNTS = (4001, 2345, 3000)
"""Tokens of the three objects; blocks cross their borders."""
TOKENS = sum(COUNTS)


class _Bucket:
    """Objects that form one sequence of the numbers 0, 1, 2, …, and a record of the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        whole, begin = np.arange(TOKENS, dtype="<u2"), 0
        self.contents = dict[ObjectPath, bytes]()
        for number, count in enumerate(COUNTS):
            self.contents[ObjectPath(f"s3://b/{number}")] = whole[begin : begin + count].tobytes()
            begin += count

    def read_ranges(self, ranges: Sequence[tuple[ObjectPath, int, int]]) -> list[bytes]:
        self.asked += [(path.url, begin, end) for path, begin, end in ranges]
        return [self.contents[path][begin:end] for path, begin, end in ranges]

    @property
    def bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.asked)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> _Bucket:
    bucket = _Bucket()
    monkeypatch.setattr(spans, "read_ranges", bucket.read_ranges)
    return bucket


def _source(order: BlockOrder | None, ranks: int = 1) -> Source:
    """Return a source whose cache is the same for both orders."""
    runs = [Run(ObjectPath(f"s3://b/{number}"), 0, np.dtype("<u2"), count) for number, count in enumerate(COUNTS)]
    files = TokenFiles(tuple(runs), ())
    reader = TokenReader(files, 2**16, ObjectSpans(files.runs, blocks_of(ORDER, T, 2, ranks)))
    return Source("web", reader, T, SEED, order)


def _epoch(source: Source, rank: int, ranks: int) -> list[list[int]]:
    """Return a rank's samples of the first epoch, in steps of 24 samples in two micro-batches."""
    batch, found = Batch(sequences=24, micro_batches=2), list[list[int]]()
    stream = MixedStream(stretch(0, {"web": 1}, {}), {"web": source}, T)
    for cursor in range(0, source.samples, 24):
        for first, end in rank_parts(batch, cursor, rank, ranks):
            found += stream.windows(min(first, source.samples), min(end, source.samples)).tolist()
    return found


def test_an_epoch_requests_each_byte_once(bucket: _Bucket) -> None:
    """Except for the extra token of each block, and for bytes shared by two blocks at a border of files."""
    source = _source(ORDER)
    samples = _epoch(source, 0, 1)
    assert sorted(row[0] for row in samples) == list(range(0, T * source.samples, T))
    assert all(row == list(range(row[0], row[0] + T + 1)) for row in samples)
    assert len({*bucket.asked}) == len(bucket.asked)
    blocks = -(-TOKENS // (4 * T))
    assert 2 * TOKENS - 2 * T < bucket.bytes <= 2 * TOKENS + 2 * blocks + 2 * 128


def test_a_random_order_of_all_windows_requests_blocks_again_and_again(bucket: _Bucket) -> None:
    """Nearly one request for each of the four windows of a block."""
    _epoch(_source(None), 0, 1)
    assert bucket.bytes > 3 * 2 * TOKENS


@pytest.mark.parametrize(("ranks", "times"), [(2, 1.6), (3, 1.1), (8, 1.1)])
def test_ranks_together_request_little_more(ranks: int, times: float, bucket: _Bucket) -> None:
    """Two ranks request pairs of windows, and each needs three pairs of four. More ranks request single windows."""
    rows, total = list[list[int]](), 0
    for rank in range(ranks):
        bucket.asked.clear()
        rows += _epoch(_source(ORDER, ranks), rank, ranks)
        assert len({*bucket.asked}) == len(bucket.asked)
        total += bucket.bytes
    assert sorted(rows) == sorted(_epoch(_source(ORDER), 0, 1))
    assert total < times * 2 * TOKENS


@pytest.mark.usefixtures("bucket")
def test_ranks_restarts_and_the_horizon_change_nothing() -> None:
    source = _source(ORDER)
    expected = [T * _slow(number, source.samples, ORDER, SEED, _key()) for number in range(1200)]
    stream = MixedStream(stretch(0, {"web": 1}, {}), {"web": source}, T)
    assert stream.windows(0, 1200)[:, 0].tolist() == expected, "into the second epoch"
    for cut in (1, 31, 32, 33, 583, 585, 1000):
        again = MixedStream(continued(cut, 0, {"web": 1}, {"web": cut}), {"web": source}, T)
        assert again.windows(cut, cut + 50)[:, 0].tolist() == expected[cut : cut + 50]
    for ranks in (2, 5):
        parts = [rank_parts(Batch(sequences=30, micro_batches=3), 570, rank, ranks) for rank in range(ranks)]
        found = [stream.windows(*part[micro])[:, 0].tolist() for micro in range(3) for part in parts]
        assert [start for part in found for start in part] == expected[570:600]


def _key() -> int:
    return int.from_bytes(hashlib.sha256(b"web").digest()[:8], "little")


@pytest.mark.usefixtures("bucket")
def test_sources_on_object_storage_have_it() -> None:
    runs = (Run(ObjectPath("s3://b/0"), 0, np.dtype("<u2"), COUNTS[0]),)
    there = open_source("web", TokenFiles(runs, ()), sequence=T, vocabulary=2**16, seed=SEED)
    assert there.order == BlockOrder(windows=2048, group=256)
    assert sorted(there.windows(np.arange(250))[:, 0].tolist()) == list(range(0, 4000, T))
