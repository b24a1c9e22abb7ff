"""The output of a pod as `pseudoreal run` reads it: an error while it is read ends the pod. Pods are small programs."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pseudoreal_trainer.cli.local_run import Event, LocalRun
from pseudoreal_trainer.cli.run_directory import RunDirectory

TRAINS = """
import signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print('{"event": "progress"}', flush=True)
signal.sigwait({signal.SIGTERM})
print("x" * 1_000_000, flush=True)  # more than a pipe holds
Path("saved").touch()
sys.exit(75)
"""
SAYS = r"""
import sys
lines = [b"[1]", b"7", b"null", b'"text"', b"words", b"[" * 100_000, b"\xff\xc3\xa9", b'{"event": "corpus"}', b"{}"]
sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
"""


@pytest.fixture
def run_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[int, bool]]]:
    """Runs a program in the place of a pod."""
    pods: list[subprocess.Popen[str]] = []

    def run(program: str, on_event: Callable[[Event], None]) -> tuple[int, bool]:
        class Pod(subprocess.Popen[str]):
            def __init__(self, _: Any, **named: Any) -> None:
                super().__init__([sys.executable, "-c", program], cwd=tmp_path, **named)
                pods.append(self)

        monkeypatch.setattr("pseudoreal_trainer.cli.local_run.subprocess.Popen", Pod)
        files = [tmp_path / name for name in ("config.json", "termination.json", "pod.log")]
        try:
            return LocalRun(cast(RunDirectory, None), on_event)._run_process(*files)
        finally:
            assert pods[-1].poll() is not None, "the pod has ended"

    yield run
    for pod in pods:
        pod.kill()
        pod.wait()


@pytest.mark.parametrize("error", [SystemExit(1), KeyError("event"), KeyboardInterrupt()], ids=repr)
def test_pod_saves_and_ends_when_its_output_cannot_be_shown(error: BaseException, run_pod: Any, tmp_path: Path) -> None:
    """If the output of `pseudoreal run` goes to `head`, rich raises SystemExit after a few lines."""

    def show(_: Event) -> None:
        raise error

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(type(error)) as raised:
        run_pod(TRAINS, show)
    assert raised.value is error
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_lines_of_a_pod_that_are_no_events_are_kept_in_its_log(run_pod: Any, tmp_path: Path) -> None:
    """Libraries print to stdout whatever they like, in any encoding."""
    shown: list[Event] = []
    assert run_pod(SAYS, shown.append) == (0, False)
    assert shown == [{"event": "corpus"}, {}]
    kept = ["[1]", "7", "null", '"text"', "words", "[" * 100_000, "\ufffdé"]
    assert (tmp_path / "pod.log").read_text(encoding="utf-8").splitlines() == kept
