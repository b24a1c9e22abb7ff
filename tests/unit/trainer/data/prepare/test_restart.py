"""A run that is killed at any point and started again leaves the same files as an uninterrupted run."""

import os
import signal
from pathlib import Path

import pytest
from pseudoreal_trainer.data.prepare.group import RECORDS

from tests.support import processes
from tests.support.processes import Forked
from tests.unit.trainer.data.prepare.support import corpora
from tests.unit.trainer.data.prepare.support.small import TEXTS, prepare_small, prepare_until

processes.preload("tests.unit.trainer.data.prepare.support.small")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "inputs").mkdir()
    return corpora.write_gzip(tmp_path / "inputs", TEXTS)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _times(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.bin")}


def test_it_is_killed_at_every_rename(inputs: Path, tmp_path: Path) -> None:
    prepare_small(inputs, tmp_path / "undisturbed")
    expected = _content(tmp_path / "undisturbed")
    shards = sum(name.endswith(".bin") for name in expected)
    assert shards == 3
    ends = []
    # Each shard has four renames: tokens, lengths, its entry, and the group's record, which has one more at the end.
    for renames in range(1, 4 * shards + 3):
        output = tmp_path / f"killed-{renames}"
        ends.append(Forked(prepare_until, inputs, output, renames).wait())
        before = dict(sorted(_times(output).items())[: (renames - 1) // 4])
        prepare_small(inputs, output)
        assert _content(output) == expected, renames
        # What was finished is not made again.
        assert {name: time for name, time in _times(output).items() if name in before} == before, renames
    assert ends == [-signal.SIGKILL] * (4 * shards + 1) + [0]


class TestWhatIsThere:
    @pytest.fixture
    def output(self, inputs: Path, tmp_path: Path) -> Path:
        prepare_small(inputs, tmp_path / "tokens")
        return tmp_path / "tokens"

    def test_nothing_is_made_again(self, inputs: Path, output: Path) -> None:
        before = _times(output)
        prepare_small(inputs, output)
        assert _times(output) == before

    def test_a_file_that_changed_is_prepared_anew(self, inputs: Path, output: Path, tmp_path: Path) -> None:
        """The changed file has the same size and name."""
        size = inputs.stat().st_size
        corpora.write_gzip(inputs.parent, [text.replace("document", "tnemucod") for text in TEXTS])
        os.truncate(inputs, inputs.stat().st_size)
        prepare_small(inputs, output)
        prepare_small(inputs, tmp_path / "fresh")
        assert _content(output) == _content(tmp_path / "fresh")
        assert abs(inputs.stat().st_size - size) < 20

    @pytest.mark.parametrize("damage", ["cut", "gone", "record"])
    def test_what_is_damaged_is_made_again(self, damage: str, inputs: Path, output: Path) -> None:
        expected = _content(output)
        first = output / "00000.bin"
        match damage:
            case "cut":
                os.truncate(output / "00001.bin", 10)
            case "gone":
                (output / "00001.json").unlink()
            case _:
                (output / RECORDS / "00000.json").write_text("{")
        before = first.stat().st_mtime_ns
        prepare_small(inputs, output)
        assert _content(output) == expected
        assert (first.stat().st_mtime_ns == before) == (damage != "record")

    def test_leftovers_of_other_text_are_removed(self, inputs: Path, output: Path, tmp_path: Path) -> None:
        (output / "00900.bin.tmp").write_bytes(b"x")
        (output / "01000.bin").write_bytes(b"another group's")
        corpora.write_gzip(inputs.parent, TEXTS[:10])
        prepare_small(inputs, output)
        (output / "01000.bin").unlink()
        prepare_small(inputs, tmp_path / "fresh")
        assert _content(output) == _content(tmp_path / "fresh")
