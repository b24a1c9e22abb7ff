"""`watch` on a real API server, in a pseudo-terminal."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client

from tests.integration.client.conftest import Terminal, make_pods, training
from tests.integration.client.support.kubelet import Kubelet, kubelet
from tests.support.cluster import Cluster, Job
from tests.support.patience import wait_for
from tests.support.trainer_log import line

pytestmark = pytest.mark.integration

OVER = {"completionTime": "2030-01-01T00:00:00Z", "currentPhase": None}


@dataclass
class Screen:
    """A pseudo-terminal of 50 lines with 120 characters, running `pseudoreal watch`."""

    process: "subprocess.Popen[bytes]"
    master: int
    text: str = ""

    def shows(self, *words: str) -> bool:
        """Return whether all words have been shown since the last successful call."""
        try:
            self.text += os.read(self.master, 2**16).decode(errors="replace")
        except BlockingIOError:
            pass
        except OSError:
            # It has ended.
            return all(word in self.text for word in words)
        if found := all(word in self.text for word in words):
            self.text = ""
        return found

    def await_words(self, *words: str) -> None:
        wait_for(str(words), lambda: self.shows(*words), lambda: self.text[-4000:])


@pytest.fixture
def node(admin: client.ApiClient, cluster: Cluster, tmp_path: Path) -> Iterator[Kubelet]:
    with kubelet(admin, f"node-{cluster.namespace[:40].strip('-')}", tmp_path) as made:
        yield made


@pytest.fixture
def screen(terminal: Terminal) -> Iterator[Callable[[str], Screen]]:
    made: list[Screen] = []

    def start(name: str) -> Screen:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        os.set_blocking(master, False)
        where = ["--kubeconfig", str(terminal.kubeconfig), "-n", terminal.namespace]
        command = [sys.executable, "-m", "pseudoreal_trainer.cli.command", "watch", name, *where]
        environment = os.environ | {"TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        made.append(Screen(process, master))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        os.close(one.master)


def test_watch_shows_the_job_until_it_ends(
    screen: Callable[[str], Screen], make_job: Callable[..., Job], node: Kubelet
) -> None:
    job = make_job("llm", training(), spec__phases__1__processesPerWorker=2)
    first, _ = make_pods(job, node=node.node)
    said = node.logs[first["metadata"]["name"]] = [line(step, 9.0 - step / 2, step) for step in (11, 13)]
    shown = screen("llm")
    # Phases, the loss of the log beside that of the status, ranks with their node, checkpoints, what remains.
    shown.await_words("phase real", "5 of 10 steps", "4.25 ┤", "2-3", node.node, "2.00 GiB", "left")
    said.append(line(15, 1.125))
    progress = training()["progress"] | {"step": 16, "loss": "3.0000"}
    job.cluster.patch_status("llm", {"progress": progress})
    shown.await_words("1.125 ┤", "6 of 10 steps", "16")
    job.cluster.patch_status("llm", {"state": "Complete"} | OVER)
    shown.await_words("Complete")
    assert shown.process.wait() == 0


def test_watch_notes_an_unreadable_log_and_shows_the_rest(
    screen: Callable[[str], Screen], make_job: Callable[..., Job]
) -> None:
    job = make_job("llm", training())
    make_pods(job)
    shown = screen("llm")
    shown.await_words("the curve has only what the status says", "gpu-1", "Running")
    job.cluster.patch_status("llm", {"state": "Failed"} | OVER)
    shown.await_words("job llm failed; pseudoreal describe llm")
    assert shown.process.wait() == 1


def test_watch_without_a_terminal_prints_lines(terminal: Terminal, make_job: Callable[..., Job]) -> None:
    make_job("llm", training(state="Complete", **OVER))
    assert terminal.says("watch", "llm") == "Complete\n"
    assert terminal("watch", "nothing").exit_code == 5
