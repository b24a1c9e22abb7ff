"""A whole `make demo` on kind, with fakes of all programs: what it says, and what it calls, are in a reviewed file.

RENEW_GOLDEN=1 rewrites the file. docs/demo.md quotes its beginning.
"""

import io
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.demo import demo, follow, report
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.progress import Progress
from rich.console import Console

from tests.unit.dev.support import fakes
from tests.unit.dev.support.programs import Programs

Json = dict[str, Any]

GOLDEN = paths.REPOSITORY / "tests" / "data" / "golden" / "demo" / "kind.txt"
LINUX_ONLY = ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "memfd_create", "O_DIRECT")
NOON = "2026-01-01T12:00:00Z"
PSEUDO = {"name": "pseudo", "state": "Complete", "step": 250, "loss": "1.8", "validationLoss": "1.9"}
REAL = {"name": "real", "state": "Complete", "step": 800, "loss": "1.4", "validationLoss": "1.5"}
WAITS = {"type": "Progressing", "status": "True", "reason": "Starting", "message": "Its pod is starting."}
STATUSES: tuple[Json, ...] = (
    {},
    {"state": "Pending", "conditions": [{**WAITS, "lastTransitionTime": NOON}]},
    {
        "state": "Training",
        "currentPhase": "pseudo",
        "progress": {"step": 200, "totalSteps": 800, "loss": "1.9", "lastUpdatedTime": NOON},
    },
    {
        "state": "Training",
        "currentPhase": "real",
        "progress": {"step": 500, "totalSteps": 800, "loss": "1.5", "lastUpdatedTime": NOON},
    },
    {"state": "Complete", "phases": [PSEUDO, {**REAL, "startValidationLoss": "1.9"}]},
)
EVENTS = (
    {"event": "corpus", "order2_nats": 1.75},
    {"event": "progress", "phase": "pseudo", "step": 200, "loss": 1.9},
    {"event": "sample", "text": "And it came to pass"},
)
POD = {
    "metadata": {
        "name": "quickstart-real-0",
        "creationTimestamp": NOON,
        "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
        "labels": {"pseudoreal.dev/stage": "train"},
    }
}
NEXT_STATUS = """
n=0; [ -e "$STATE/n" ] && read n < "$STATE/n"; n=$((n + 1)); echo $n > "$STATE/n"; /bin/cat "$STATE/status-$n" """


@pytest.fixture
def mac(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A Mac with Docker Desktop and kind. Its cluster trains a job, whose status is read five times."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    for name in LINUX_ONLY:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(cluster, "status", lambda: cluster.Status((), "the cluster is not up"))
    fakes.add(programs, "docker", "kind", "helm")
    for number, status in enumerate(STATUSES, 1):
        (programs.state / f"status-{number}").write_text(json.dumps({"status": status}))
    (programs.state / "pods").write_text(json.dumps({"items": [POD]}))
    (programs.state / "log").write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    answers = {
        **fakes.KUBECTL,
        "*get pseudorealjob *": NEXT_STATUS,
        "*get pods *": '/bin/cat "$STATE/pods"',
        "*logs *": '/bin/cat "$STATE/log"',
        "*get prj -o wide*": "echo 'NAME         STATE      PHASE'",
        "*describe prj *": "echo 'Name:         quickstart'",
    }
    programs.add("kubectl", answers)
    return programs


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is shown; the clock goes on only while the demo waits for the job."""
    now = [0.0]
    out = io.StringIO()
    display = Progress(Console(file=out, width=120, highlight=False, soft_wrap=True), clock=lambda: now[0])
    for module in [module for name, module in sys.modules.items() if name.startswith("pseudoreal_dev.")]:
        if isinstance(getattr(module, "progress", None), Progress):
            monkeypatch.setattr(module, "progress", display)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return out


def plain(text: str, cache: Path) -> str:
    """Replace what differs between machines and versions of the sources."""
    text = text.replace(str(cache), "~/.cache/pseudoreal").replace(str(paths.REPOSITORY), "~/pseudoreal")
    return re.sub(r"(pseudoreal-(?:operator|trainer)[:.]|tag=)[0-9a-f]{16}", r"\1TAG", text)


def test_a_whole_demo(mac: Programs, shown: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(report, "draw", lambda *what: drawn.append(what))
    demo.run("quickstart")
    assert drawn
    calls = "\n".join(mac.calls())
    found = plain(f"$ make demo\n{shown.getvalue()}\nThe programs that it called:\n\n{calls}\n", tmp_path / "cache")
    if os.environ.get("RENEW_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


def test_the_document_shows_the_transcript() -> None:
    """Its beginning: the losses that follow are those of the fakes."""
    beginning = GOLDEN.read_text().partition("following quickstart")[0].rpartition("\n")[0]
    assert "kind cluster" in beginning
    assert beginning in (paths.REPOSITORY / "docs" / "demo.md").read_text()


def test_a_refusal_ends_the_program_with_an_exit_code_and_no_traceback(programs: Programs) -> None:
    """Without what Linux alone has, all modules can still be imported."""
    code = f"""
import os, platform
platform.system, os.geteuid = lambda: "Darwin", lambda: 501
for name in {LINUX_ONLY}:
    vars(os).pop(name, None)
from pseudoreal_dev.cli import main
main()
"""
    environment = {**os.environ, "PATH": str(programs.folder)}
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "this is Darwin, and the cluster needs Linux" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
