"""The command `pseudoreal data prepare`: its processes, its folder, and its end."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from pseudoreal_trainer.data.prepare import inputs as inputs_module
from pseudoreal_trainer.data.prepare.group import RECORDS
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.prepare import PLAN, Prepared, prepare
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.prepare.workers import Totals
from pseudoreal_trainer.data.tokens.native import read_index, verify
from pseudoreal_trainer.errors import InvalidJobError

from tests.support.patience import wait_for
from tests.unit.trainer.data.conftest import drawn_texts
from tests.unit.trainer.data.prepare.support import corpora

PROGRAM = """
import sys
from pathlib import Path
from pseudoreal_trainer.data.prepare.prepare import prepare
from pseudoreal_trainer.data.prepare.settings import Settings
corpus, output = map(Path, sys.argv[1:])
prepare([corpus], output, "bytes", None, Settings(shard_bytes=200_000), 2, lambda *_: None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five groups of inputs of several kinds."""
    monkeypatch.setattr(inputs_module, "GROUP_BYTES", 30_000)
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number, text in enumerate(drawn_texts(120_000)):
        name = folder / f"{number:03d}.jsonl"
        name.write_bytes(corpora.json_lines(text.split("\n\n")))
    corpora.write_parquet(folder, ["a row", "another one"])
    (folder / "README").write_text("not a text to learn")
    return folder


def _prepare(
    paths: Sequence[Path],
    output: Path,
    tokenizer: Path | str = "bytes",
    *,
    workers: int = 1,
    settings: Settings = Settings(shard_bytes=20_000),  # noqa: B008
    seen: list[tuple[Totals, int]] | None = None,
) -> Prepared:
    seen = [] if seen is None else seen
    return prepare(paths, output, str(tokenizer), None, settings, workers, lambda *each: seen.append(each))


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_any_number_of_processes_makes_the_same_files(folder: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[Totals, int]] = []
    done = _prepare([folder], tmp_path / "one", tokenizer_folder, workers=1, seen=seen)
    assert _prepare([folder], tmp_path / "two", tokenizer_folder, workers=2) == done
    assert _content(tmp_path / "one") == _content(tmp_path / "two")
    index = read_index(tmp_path / "one")
    assert index == done.index
    assert len(groups_of(find_inputs([folder]))) > 3
    for shard in index.shards:
        verify(tmp_path / "one", index, shard)

    totals, size = seen[-1]
    assert totals.read_bytes == size == sum(file.stat().st_size for file in folder.glob("*.*"))
    assert (totals.tokens, totals.documents, totals.text_bytes) == (index.tokens, index.documents, index.text_bytes)


def test_ten_thousand_small_files_are_few_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs_module, "GROUP_BYTES", 1000)
    for number in range(100):
        (tmp_path / f"{number:03d}.txt").write_text("x" * 50)
    (tmp_path / "050.txt").write_text("x" * 5000)
    sizes = [len(group.inputs) for group in groups_of(find_inputs([tmp_path]))]
    assert sizes == [20, 20, 11, 20, 20, 9]


def test_whoever_begins_a_folder_otherwise_is_refused(folder: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Except for the number of malformed documents, which changes no shard."""
    output = tmp_path / "tokens"
    _prepare([folder], output)
    before = _content(output)
    for said, paths, arguments in (
        ("tokenizer was", [folder], {"tokenizer": tokenizer_folder}),
        ("shardBytes was 20000, and is 30000 now", [folder], {"settings": Settings(shard_bytes=30_000)}),
        ("sequence was None, and is 64", [folder], {"settings": Settings(shard_bytes=20_000, sequence=64)}),
        ("its inputs 0 were 000.jsonl", [folder / "001.jsonl"], {}),
    ):
        with pytest.raises(InvalidJobError, match=f"tokens was begun otherwise: {said}"):
            _prepare(paths, output, **arguments)
    _prepare([folder], output, settings=Settings(shard_bytes=20_000, most_malformed=5))
    assert _content(output) == before


class TestInputs:
    def test_those_that_cannot_be_used_are_named(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (folder / "none.txt").write_text("")
        for paths, said in (
            ([folder / "nowhere"], "nowhere is not there"),
            ([folder / "README"], r"README is of no kind that can be prepared; these are: \*.jsonl"),
            ([tmp_path / "empty"], "empty holds no file to prepare"),
            ([folder, folder / "000.jsonl"], "000.jsonl is given twice"),
            ([folder / "none.txt"], "the inputs hold no text"),
        ):
            with pytest.raises(InvalidJobError, match=said):
                _prepare(paths, tmp_path / "tokens")
            (tmp_path / "tokens" / PLAN).unlink(missing_ok=True)

    def test_a_folder_that_is_not_its_own_is_not_written_to(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError, match=r"inputs holds other files, and no prepare.json"):
            _prepare([folder], folder)
        (tmp_path / PLAN).write_text("{")
        with pytest.raises(InvalidJobError, match=r"prepare.json is damaged"):
            _prepare([folder], tmp_path)

    def test_two_runs_do_not_share_a_folder(self, folder: Path, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InvalidJobError, match="another process prepares"):
            _prepare([folder], tmp_path)
        os.close(descriptor)

    def test_an_error_of_a_process_is_the_error_of_all(self, folder: Path, tmp_path: Path) -> None:
        (folder / "000.jsonl").write_text("{\n")
        with pytest.raises(InvalidJobError, match=r"000.jsonl line 1 cannot be used: it is not JSON"):
            _prepare([folder], tmp_path / "tokens", workers=2)
        assert not (tmp_path / "tokens" / "index.json").exists()


class TestKilled:
    @pytest.fixture
    def corpus(self, tmp_path: Path) -> Path:
        text = "".join(drawn_texts(400_000))
        (tmp_path / "inputs").mkdir()
        for number in range(10):
            (tmp_path / "inputs" / f"{number:02d}.txt").write_text(text)
        return tmp_path / "inputs"

    def _start(self, corpus: Path, output: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", PROGRAM, str(corpus), str(output)]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    def test_by_the_system_and_started_again(self, corpus: Path, tmp_path: Path) -> None:
        """A second run makes the same files as an uninterrupted run."""
        output = tmp_path / "tokens"
        killed = self._start(corpus, output)
        wait_for("a first shard", lambda: [*output.glob(f"{RECORDS}/*.json")], pause=0.01)
        _kill(killed)
        for folder in (output, tmp_path / "whole"):
            run = self._start(corpus, folder)
            assert run.wait() == 0, run.communicate()
        assert _content(output) == _content(tmp_path / "whole")

    def test_in_the_middle_of_a_file_that_takes_hours(self, corpus: Path, tmp_path: Path) -> None:
        """The worker process that reads the file ends as well."""
        os.truncate(corpus / "00.txt", 1 << 40)
        killed = self._start(corpus, tmp_path / "tokens")
        wait_for("somebody who reads", lambda: str(corpus / "00.txt") in _open_in(corpus))
        _kill(killed)

    def test_a_process_alone(self, corpus: Path, tmp_path: Path) -> None:
        """The run ends with an error message."""
        output = tmp_path / "tokens"
        run = self._start(corpus, output)
        wait_for("a first shard", lambda: [*output.glob(f"{RECORDS}/*.json")], pause=0.01)
        workers = [child for child in _children(run) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        assert workers
        for child in workers:
            os.kill(int(child), signal.SIGKILL)
        _, said = run.communicate()
        assert b"TrainingError: a process that prepares text has ended with the exit code -9" in said


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process, and return once its children have ended, which happens on their own shortly after."""
    children = _children(process)
    process.kill()
    process.communicate()
    wait_for("the end of its processes", lambda: not any(_runs(child) for child in children))


def _children(process: "subprocess.Popen[bytes]") -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _open_in(folder: Path) -> set[str]:
    """Return the files below the folder that any process of this machine has open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(link))
    return {file for file in found if file.startswith(str(folder))}
