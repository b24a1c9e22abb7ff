"""Ctrl-C during `make run`: the terminal sends SIGINT to make, to its shell and to `pseudoreal run` at once."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main

from tests.support.patience import wait_for
from tests.support.processes import LIMIT_SECONDS

ROOT = Path(__file__).parents[4]
CTRL_C = b"\x03"


class Terminal:
    """Terminal of its own for a program, with everything that the terminal has shown."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self._shown = bytearray()
        self.master, slave = pty.openpty()
        # A wide window, so that no sentence is wrapped.
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 300, 0, 0))
        self.process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=partial(_log_in, slave))
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def text(self) -> str:
        return self._shown.decode(errors="replace")

    def wait(self) -> int:
        """Return the exit code, once the program has ended and its last output was read."""
        exit_code = self.process.wait(LIMIT_SECONDS)
        self._reader.join(LIMIT_SECONDS)
        return exit_code

    def _read(self) -> None:
        with suppress(OSError):  # no program has the terminal open any more
            while shown := os.read(self.master, 65536):
                self._shown += shown


def _log_in(slave: int) -> None:
    # A shell lets programs in its background ignore SIGINT, and a terminal's programs would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.login_tty(slave)


@contextmanager
def _terminal(command: Sequence[str], folder: Path) -> Iterator[Terminal]:
    """Run the command in a terminal; at the end, kill all processes in the folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    terminal = Terminal(command, folder, environment | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"})
    try:
        yield terminal
    finally:
        for pid in _processes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def _processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is the folder: all that a run in the folder has started."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


def _interrupt(command: Sequence[str], folder: Path) -> tuple[int, str, list[int]]:
    """Run the command in a terminal and press Ctrl-C after its first step. Return the exit code, everything that the
    terminal has shown, and the steps in the metrics."""

    def steps() -> list[int]:
        found = next(folder.glob("pseudoreal-runs/*/metrics.jsonl"), None)
        lines = found.read_text().rpartition("\n")[0].splitlines() if found else []
        return [json.loads(line)["step"] for line in lines]

    before = len(steps())
    with _terminal(command, folder) as terminal:

        def has_trained() -> bool:
            assert terminal.process.poll() is None, terminal.text()
            return len(steps()) > before

        wait_for("a step", has_trained, terminal.text, pause=0.01)
        assert len(_processes_in(folder)) >= 4, "`pseudoreal run`, the pod and two ranks"
        os.write(terminal.master, CTRL_C)
        exit_code = terminal.wait()
        assert _processes_in(folder) == []
        return exit_code, terminal.text(), steps()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes of a run in /proc")
def test_ctrl_c_under_make_run_saves_and_says_how_to_go_on(job_body: dict[str, Any], tmp_path: Path) -> None:
    spec = job_body["spec"]
    spec["phases"] = [spec["phases"][1] | {"until": {"step": 10**6}}]
    spec["checkpoint"]["everySteps"] = spec["data"]["validation"]["everySteps"] = 10**6
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_body))
    # RUN: the environment of this test. -o: make does not build the environment of `make run`.
    make = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv-run/ready", "run", "JOB=job.yaml"]
    exit_code, said, first = _interrupt([*make, f"RUN={Path(sys.executable).parent}"], tmp_path)
    assert exit_code == -signal.SIGINT, said
    checkpoint = f"real-{first[-1]:08d}"
    assert f"phase real: Yielded: asked to stop; saved checkpoint {checkpoint}" in said
    assert "Traceback" not in said
    (command,) = re.findall(r"go on with: (.*?)\r?\n", said)
    exit_code, said, steps = _interrupt(shlex.split(command), tmp_path)
    assert exit_code == 75, said
    assert f"resumed from {checkpoint}" in said
    assert "Traceback" not in said
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len(first)


def test_ctrl_c_while_the_pod_starts_stops_the_pod(
    job_body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            pods.append(self)
            signal.raise_signal(signal.SIGINT)

    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_body))
    monkeypatch.setattr("pseudoreal_trainer.cli.local_run.subprocess.Popen", Interrupted)
    try:
        ended = CliRunner().invoke(main, ["run", str(tmp_path / "job.yaml"), "--workdir", str(tmp_path / "runs")])
        assert ended.exit_code == 75, ended.output
        assert "go on with: " in ended.stderr
        assert pods[0].poll() is not None, "the pod has ended"
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
