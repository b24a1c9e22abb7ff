"""Commands of the tutorials: the program takes them, and those of a laptop run."""

import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_dev.machine.paths import REPOSITORY
from pseudoreal_trainer.cli.command import main

from tests.support.documents import FENCE
from tests.support.patience import wait_for

PAGES = sorted((REPOSITORY / "docs/tutorials").glob("*.md"))
PROGRAM = re.compile(r"^(?:\.venv(?:-run)?/bin/|kubectl )?pseudoreal (?P<words>.*)$")
FILE = re.compile(
    r"[Ww]rite `(?P<name>[\w./-]+\.yaml)`(?:(?!```).)*```yaml\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
"""A file that a page tells its reader to write."""


def _lines(page: Path) -> Iterator[str]:
    """Yield the commands of a page; a backslash continues a line."""
    for language, block in FENCE.findall(page.read_text()):
        if language == "sh":
            yield from block.replace("\\\n", " ").splitlines()


def _calls(page: Path) -> Iterator[list[str]]:
    for line in _lines(page):
        if match := PROGRAM.match(line.split(" | ")[0]):
            yield shlex.split(match["words"], comments=True)


CALLS = [(page.stem, words) for page in PAGES for words in _calls(page)]


def parse(words: list[str]) -> None:
    """Parse a call of `pseudoreal` without running it. Raises click's UsageError for what the program would refuse."""
    command: click.Command = main
    context = click.Context(main, info_name="pseudoreal")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)  # type: ignore[assignment]
        context = click.Context(command, info_name=name, parent=context)
    command = copy.copy(command)
    command.params = [_without_files(param) for param in command.params]
    command.parse_args(context, words)


def _without_files(param: click.Parameter) -> click.Parameter:
    """Return the parameter, with any text as its value if it names a file: an earlier command of the page makes it."""
    if isinstance(param.type, click.Choice | click.IntRange | click.FloatRange | type(click.BOOL)):
        return param
    param = copy.copy(param)
    param.type, param.callback = click.STRING, None
    return param


@pytest.mark.parametrize(("page", "words"), CALLS, ids=[f"{page}-{' '.join(words)}"[:80] for page, words in CALLS])
def test_program_takes_the_command(page: str, words: list[str]) -> None:  # noqa: ARG001
    parse(words)


@pytest.mark.parametrize("words", ["plan job.yaml --fast 3", "export x --format gguf --output y", "trains x", "run"])
def test_wrong_command_is_noticed(words: str) -> None:
    with pytest.raises(click.UsageError):
        parse(words.split())


def test_tutorials_have_commands() -> None:
    assert len(CALLS) > 40
    assert {page for page, _ in CALLS} >= {page.stem for page in PAGES} - {"index", "first-change"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_jobs_of_a_page_can_run(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text()):
        for body in yaml.safe_load_all(block) if language == "yaml" else ():
            if isinstance(body, dict) and body.get("kind") == "PseudoRealJob":
                check_resolvable(check_job(body).spec)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_patches_of_a_page_have_fields_of_a_job(page: Path) -> None:
    for patch in re.findall(r"--type[ =]merge -p '([^']+)'", page.read_text()):
        assert json.loads(patch)["spec"].keys() <= PseudoRealJobSpec.model_json_schema()["properties"].keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_says_how_far_its_commands_were_run(page: Path) -> None:
    said = r"\b(was|were) (not )?run\b|\ba test (runs|checks|reads)\b|takes two minutes"
    assert re.search(said, page.read_text(), re.IGNORECASE)


class _Reader:
    """Somebody who follows a page in a copy of the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(REPOSITORY / "examples", folder / "examples", ignore=shutil.ignore_patterns("corpus"))
        program = folder / ".venv-run/bin/pseudoreal"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pseudoreal_trainer.cli.command "$@"\n')
        program.chmod(0o755)

    def write_files(self, page: Path) -> None:
        for match in FILE.finditer(page.read_text()):
            (self.folder / match["name"]).write_text(match["text"])

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    def succeed(self, line: str) -> str:
        done = self.run(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def killed(self, start: str, kill: str) -> str:
        """Start the drill, kill the processes that the page's command kills, and return the output."""
        metrics, log = self.folder / "pseudoreal-runs/drill/metrics.jsonl", self.folder / "drill.log"
        with log.open("w") as output:
            run = subprocess.Popen(["bash", "-c", f"exec {start}"], cwd=self.folder, stdout=output, stderr=output)
        wait_for("30 steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 30, patience=600)
        pattern = kill.removeprefix("pkill -KILL -f ").strip("'")
        found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=True).stdout.split()
        # Other tests of this machine may run the same tutorial.
        ranks = [pid for pid in map(int, found) if Path(f"/proc/{pid}/cwd").resolve() == self.folder.resolve()]
        assert len(ranks) == 1, f"{kill} finds the rank, and nothing else of this run"
        os.kill(ranks[0], signal.SIGKILL)
        assert run.wait(timeout=300) != 0
        return log.read_text()

    def metrics(self, run: str) -> list[dict[str, Any]]:
        lines = (self.folder / "pseudoreal-runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def _page(name: str) -> Path:
    return REPOSITORY / "docs/tutorials" / f"{name}.md"


@pytest.mark.long
def test_continuing_from_weights_works_as_written(tmp_path: Path) -> None:
    reader, page = _Reader(tmp_path), _page("hugging-face")
    reader.write_files(page)
    for line in _lines(page):
        reader.succeed(line)
    first, second = reader.metrics("tiny"), reader.metrics("continue")
    last = [row["validation_loss"] for row in first if row["validation_loss"] is not None][-1]
    assert f"val {last:.4f}" in reader.succeed(".venv-run/bin/pseudoreal run continue.yaml --workdir again")
    assert len(second) == 60
    job = (tmp_path / "continue.yaml").read_text().replace("hiddenSize: 64", "hiddenSize: 128")
    (tmp_path / "wrong.yaml").write_text(job)
    assert reader.run(".venv-run/bin/pseudoreal run wrong.yaml").returncode == 78
    assert (tmp_path / "pseudoreal-runs/model/config.json").exists()


@pytest.mark.long
def test_laptop_and_drill_work_as_written(tmp_path: Path) -> None:
    """`make run` is replaced by the command that it calls; the drill's faults meet its run at step 30 or later."""
    reader = _Reader(tmp_path)
    reader.succeed(".venv-run/bin/pseudoreal run examples/laptop.yaml --workdir pseudoreal-runs/20260101-000000")
    for line in _lines(_page("laptop")):
        if line != "make run" and "/second" not in line:
            reader.succeed(line)
    prepare, start, resume, kill, *after = _lines(_page("faults"))
    reader.succeed(prepare)
    log = reader.killed(start, kill)
    assert "Failed: local rank 0 ended without a message" in log
    assert "--resume" in log
    reader.succeed(resume)
    undisturbed, disturbed = reader.metrics("20260101-000000"), reader.metrics("drill")
    assert [row["loss"] for row in disturbed] == [row["loss"] for row in undisturbed]
    copy, damage, verify, report = after[:4]
    reader.succeed(copy)
    reader.succeed(damage)
    found = reader.run(verify)
    assert found.returncode != 0
    assert "weights-00000.safetensors has the SHA-256" in found.stderr
    reader.succeed(report)
