"""The samples of a mixture, over ranks, micro-batches, restarts and phases, compared with a slow reference."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.spec.phase import Batch
from pseudoreal_trainer.data import step_order
from pseudoreal_trainer.data.order import continued, stretch
from pseudoreal_trainer.data.sources import MixedStream, Places, Source, open_source
from pseudoreal_trainer.data.step_order import StepOrder
from pseudoreal_trainer.data.stream import Indices, rank_parts
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles
from pseudoreal_trainer.errors import InvalidJobError

from tests.support.depth import DEPTH
from tests.unit.trainer.data.support.slow_permutation import permuted

SEQUENCE, SEED = 5, 11
TOKENS = {"web": 203, "code": 64}
WEIGHTS = {"web": 3, "code": 2}
Counts = dict[str, int]


def _files(folder: Path, name: str) -> TokenFiles:
    """Write a source in which each token equals its own position, plus 1,000 for the source `code`."""
    tokens = np.arange(TOKENS[name], dtype="<u2") + 1000 * (name == "code")
    tokens.tofile(folder / name)
    return TokenFiles((Run(folder / name, 0, np.dtype("<u2"), len(tokens)),), ())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: open_source(name, _files(folder, name), sequence=SEQUENCE, vocabulary=2000, seed=SEED) for name in TOKENS
    }


def _expected(name: str, number: int) -> list[int]:
    """Return a sample of a source, computed one number at a time with Python's integers."""
    samples = (TOKENS[name] - 1) // SEQUENCE
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    window = permuted(number % samples, samples, SEED, number // samples, key)
    first = window * SEQUENCE + 1000 * (name == "code")
    return list(range(first, first + SEQUENCE + 1))


def _expected_stream(count: int) -> list[list[int]]:
    """Return the first samples. Slots of the period, of length 5, by hand: earliest deadline of web (slots end at 2, 4,
    5) and code (3, 5)."""
    slots = ["web", "code", "web", "web", "code"]
    taken = {"web": 0, "code": 0}
    found = []
    for cursor in range(count):
        name = slots[cursor % 5]
        found.append(_expected(name, taken[name]))
        taken[name] += 1
    return found


def test_an_epoch_of_a_source_is_each_of_its_windows_once(sources: dict[str, Source]) -> None:
    samples = sources["web"].samples
    assert samples == 40
    epochs = [sources["web"].windows(np.arange(e * 40, e * 40 + 40))[:, 0].tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 200, 5))
    assert epochs[0] != epochs[1]


def test_sources_of_one_size_have_orders_of_their_own(sources: dict[str, Source]) -> None:
    other = Source("news", sources["web"].reader, SEQUENCE, SEED)
    assert other.windows(np.arange(40)).tolist() != sources["web"].windows(np.arange(40)).tolist()


def test_the_order_is_the_slow_one(sources: dict[str, Source]) -> None:
    stream = MixedStream(stretch(0, WEIGHTS, {}), sources, SEQUENCE)
    assert stream.windows(0, 300).tolist() == _expected_stream(300)
    assert stream.windows(123, 140).tolist() == _expected_stream(140)[123:]
    assert stream.windows(7, 7).shape == (0, SEQUENCE + 1)


runs = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5
)


@settings(max_examples=DEPTH.of(30, 1000))
@given(runs)
def test_cut_at_any_step_it_goes_on_with_the_same_windows(
    sources: dict[str, Source], runs: list[tuple[int, int, int, int]]
) -> None:
    """Each run has its own ranks, micro-batches, width and number of steps; it knows the runs before only from the
    state stored in a checkpoint."""
    cursor, consumed = 0, dict[str, int]()
    seen: list[list[int]] = []
    for ranks, micro_batches, width, steps in runs:
        batch = Batch(sequences=width * micro_batches, micro_batches=micro_batches)
        streams = [MixedStream(continued(cursor, 0, WEIGHTS, consumed), sources, SEQUENCE) for _ in range(ranks)]
        for _ in range(steps):
            parts = [rank_parts(batch, cursor, rank, ranks) for rank in range(ranks)]
            for micro in range(micro_batches):
                for stream, part in zip(streams, parts, strict=True):
                    seen += stream.windows(*part[micro]).tolist()
            cursor += batch.sequences
        consumed = streams[0].stretch.consumed(cursor)
    assert seen == _expected_stream(cursor)


@pytest.mark.parametrize("at_once", [1, 9, 4096])
@pytest.mark.parametrize("rank", range(3))
def test_samples_of_many_steps_are_located_at_a_time(
    at_once: int, rank: int, sources: dict[str, Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 steps of two micro-batches with 4 samples each; of three ranks, one has 2 samples and the others 1."""
    monkeypatch.setattr(step_order, "AT_ONCE", at_once)
    places, called = MixedStream.places, list[int]()

    def counted(stream: MixedStream, cursors: Indices) -> Places:
        called.append(len(cursors))
        return places(stream, cursors)

    monkeypatch.setattr(MixedStream, "places", counted)
    batch, begin = Batch(sequences=8, micro_batches=2), 16
    stream = MixedStream(continued(begin, 0, WEIGHTS, stretch(0, WEIGHTS, {}).consumed(begin)), sources, SEQUENCE)
    order = StepOrder(stream, lambda cursor: rank_parts(batch, cursor, rank, 3), 8)
    expected = _expected_stream(begin + 320)
    for cursor in range(begin, begin + 320, 8):
        parts, step = rank_parts(batch, cursor, rank, 3), order.step(cursor)
        assert [*step] == parts
        assert [stream.read(step[part]).tolist() for part in parts] == [expected[first:end] for first, end in parts]
    own = sum(end - first for first, end in rank_parts(batch, 0, rank, 3))
    assert len(called) == -(-40 // max(1, at_once // own))
    assert max(called) <= max(own, at_once)


@pytest.mark.parametrize("steps", range(13))
def test_cut_at_every_step_of_a_job_of_two_phases(sources: dict[str, Source], steps: int) -> None:
    """Six steps of four samples with one mixture, then six with another, interrupted after one of the steps."""

    def phase(
        begin: int, end: int, weights: dict[str, int], before: dict[str, int]
    ) -> tuple[list[list[int]], dict[str, int]]:
        part = stretch(begin, weights, before)
        cut = min(max(4 * steps, begin), end)
        first = MixedStream(part, sources, SEQUENCE).windows(begin, cut).tolist()
        again = MixedStream(continued(cut, begin, weights, part.consumed(cut)), sources, SEQUENCE)
        return first + again.windows(cut, end).tolist(), again.stretch.consumed(end)

    one, consumed = phase(0, 24, WEIGHTS, {})
    two, consumed = phase(24, 48, {"code": 1}, consumed)
    taken = sum(row[0] >= 1000 for row in one)
    assert one == _expected_stream(24)
    assert two == [_expected("code", taken + number) for number in range(24)]
    assert consumed == {"web": 24 - taken, "code": taken + 24}


def test_windows_for_validation_are_spread_over_the_files(sources: dict[str, Source]) -> None:
    """Web has 40 windows, and code has 12."""
    assert sources["web"].spread(4)[:, 0].tolist() == [0, 50, 100, 150]
    assert sources["web"].spread(4).shape == (4, SEQUENCE + 1)
    assert sources["code"].spread(99)[:, 0].tolist() == list(range(1000, 1060, 5))


def test_files_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, "code")
    native = TokenFiles(files.runs, (), vocabulary=2001)
    with pytest.raises(InvalidJobError, match=r"the source code has a vocabulary of 2,001, and the model's is 2,000"):
        open_source("code", native, sequence=SEQUENCE, vocabulary=2000, seed=0)
    assert open_source("code", files, sequence=63, vocabulary=2000, seed=0).samples == 1
    with pytest.raises(InvalidJobError, match=r"the source code has 64 tokens, .*model.sequenceLength \+ 1 = 65"):
        open_source("code", files, sequence=64, vocabulary=2000, seed=0)


def test_many_sources_share_the_files_that_may_be_open(tmp_path: Path) -> None:
    """32 sources of 40 files each exceed the number of open files that many systems allow."""
    files, before = _in_many_files(tmp_path, 40), len(os.listdir("/proc/self/fd"))
    sources = [open_source(f"s{n}", files, sequence=5, vocabulary=2**16, seed=0, sources=32) for n in range(32)]
    for source in sources:
        assert source.windows(np.arange(source.samples)).shape == (79, 6)
    assert len(os.listdir("/proc/self/fd")) - before == 512
    for source in sources:
        source.reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def _in_many_files(folder: Path, count: int) -> TokenFiles:
    """Write `count` files of 10 tokens each."""
    for number in range(count):
        np.arange(10, dtype="<u2").tofile(folder / str(number))
    return TokenFiles(tuple(Run(folder / str(number), 0, np.dtype("<u2"), 10) for number in range(count)), ())
