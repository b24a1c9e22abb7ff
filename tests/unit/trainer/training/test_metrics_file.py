"""On a restart metrics.jsonl is truncated after the checkpoint's step: all later lines go, all earlier lines stay."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.training import metrics_file
from pseudoreal_trainer.training.metrics_file import truncate_after

from tests.support.cpu_time import seconds, slowness


def _line(step: int, **more: Any) -> str:
    return json.dumps({"phase": "pseudo", "step": step, "loss": 2.5} | more) + "\n"


def _lines(steps: range) -> str:
    return "".join(map(_line, steps))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("step", [0, 1, 4, 9, 10, 99])
def test_metrics_lines_up_to_the_step_are_kept(
    file: Path, step: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", block)
    file.write_text(_lines(range(1, 11)))
    truncate_after(file, step)
    assert file.read_text() == _lines(range(1, min(step, 10) + 1))
    truncate_after(file, step)
    assert file.read_text() == _lines(range(1, min(step, 10) + 1))


@pytest.mark.parametrize("block", [1, 13, 1 << 20])
def test_a_truncated_metrics_line_is_removed_and_whole_lines_stay(
    file: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", block)
    text, last = _lines(range(1, 4)), _line(4)
    for count in range(len(last) + 1):
        file.write_text(text + last[:count])
        truncate_after(file, 9)
        whole = count >= len(last) - 1
        assert file.read_text() == text + (last if whole else ""), "a line stays only if at most its newline is missing"


@pytest.mark.parametrize(
    "behind",
    [
        b"\0" * 5000,
        b"\n\n\n",
        b"null\n",
        b"[1]\n",
        b'{"step": "x"}\n',
        b'{"step": null}\n',
        b'{"phase": "pseudo"}\n',
        b"[" * 100_000 + b"\n",
        b'{"phase": "pseudo", "step": 999999999999999999999999, "loss": 1}\n',
        b"\xff\xfe\n",
    ],
    ids=lambda behind: repr(behind[:12]),
)
def test_invalid_metrics_lines_are_removed(file: Path, behind: bytes) -> None:
    kept = _lines(range(1, 4)).encode()
    file.write_bytes(kept + behind)
    truncate_after(file, 9)
    assert file.read_bytes() == kept
    file.write_bytes(behind)
    truncate_after(file, 9)
    assert file.read_bytes() == b""


def test_a_line_of_a_sample_that_speaks_of_steps_is_read_as_json(file: Path) -> None:
    text = _line(1) + _line(2, text='{"phase": "pseudo", "step": 99, "a"') + '{"loss": 1, "step": 3}\n'
    file.write_text(text + _line(4))
    truncate_after(file, 3)
    assert file.read_text() == text


def test_a_missing_metrics_file_is_created(file: Path) -> None:
    truncate_after(file, 3)
    assert file.read_bytes() == b""


def test_the_metrics_file_is_truncated_by_one_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is truncated in place: a crash leaves the old lines or the new ones, and open readers keep
    their file."""
    file.write_text(_lines(range(1, 101)))
    before, read = os.stat(file).st_ino, _counted(monkeypatch, os, "pread")
    monkeypatch.setattr(metrics_file, "_BLOCK_BYTES", 256)
    truncate_after(file, 98)
    assert (os.stat(file).st_ino, [path.name for path in file.parent.iterdir()]) == (before, [file.name])
    assert sum(size for _, size, _ in read) < 2000, "the lines that stay are not read"


def test_truncation_of_a_million_lines_reads_only_the_removed_ones_and_parses_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing all lines would take 5 s or more."""
    file.write_text("".join(f'{{"phase":"pseudo","step":{step},"loss":2.5}}\n' for step in range(1, 1_000_001)))
    parsed, read = _counted(monkeypatch, json, "loads"), _counted(monkeypatch, os, "pread")
    assert seconds(lambda: truncate_after(file, 999_000)) < slowness()
    assert (len(parsed), parsed[0][0]) == (1, b'{"phase":"pseudo","step":999000,"loss":2.5}\n')
    assert len(read) == 2, "one read for the last block, one for the end of the last line"
    assert file.read_bytes().endswith(parsed[0][0])
    truncate_after(file, 0)
    assert len(parsed) == 1, "the step numbers, found by text search, are enough"
    assert file.read_bytes() == b""


def _counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Patch a function; return a list that collects the arguments of each later call."""
    calls: list[tuple[Any, ...]] = []
    act = getattr(module, name)

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return act(*arguments)

    monkeypatch.setattr(module, name, call)
    return calls
