"""Warnings and errors of the operator on the cluster. If an error makes a test wait in vain, the test can fail
early."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.demo import chart
from pseudoreal_dev.machine import shell

Line = dict[str, Any]
AGAIN_AND_AGAIN = timedelta(seconds=120)
LONGEST_PAUSE = timedelta(seconds=90)
"""Longest pause between two repetitions: failing reconcile passes are at most a minute apart."""
LOOK_SECONDS = 20.0
SHOWN = 40
_LOG = ("logs", f"--namespace={chart.NAMESPACE}", f"deployment/{chart.RELEASE}")
_PREVIOUS = "--previous"


def complaints(log: str) -> list[Line]:
    """Return warnings and errors, in chronological order."""
    return [line for line in _lines(log) if line.get("level") in ("warning", "error", "critical")]


def repeated(lines: Iterable[Line]) -> str | None:
    """Return a sentence on an error repeated for the same job for two minutes, up to now; else None. Pure."""
    found = list(lines)
    times: defaultdict[tuple[str, str, str], list[datetime]] = defaultdict(list)
    for line in found:
        if "error" in line:
            times[line["event"], line["error"], line.get("job", "")].append(_time(line))
    for (event, error, job), moments in times.items():
        run = _last_run(moments)
        if run[-1] - run[0] >= AGAIN_AND_AGAIN and _time(found[-1]) - run[-1] <= LONGEST_PAUSE:
            return f"the operator says {event} of {job or 'itself'} again and again since {run[0]}: {error}"
    return None


def _last_run(moments: list[datetime]) -> list[datetime]:
    """Return the newest run of times without a long pause."""
    begin = len(moments) - 1
    while begin > 0 and moments[begin] - moments[begin - 1] <= LONGEST_PAUSE:
        begin -= 1
    return moments[begin:]


def shown(kubernetes: Kubernetes) -> str:
    """Return the operator's newest complaints, including the previous container's."""
    logs = [_read(kubernetes, _PREVIOUS), _read(kubernetes)]
    lines = [json.dumps(line) for log in logs for line in complaints(log)][-SHOWN:]
    return "\n".join(["The operator's warnings and errors:", *(lines or ["(none)"])])


@dataclass
class Watch:
    """Fails a waiting test once the operator repeats an error."""

    kubernetes: Kubernetes
    _next: float = field(default_factory=lambda: time.monotonic() + LOOK_SECONDS)

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        if said := repeated(complaints(_read(self.kubernetes, "--since=5m"))):
            pytest.fail(f"{said}\n{shown(self.kubernetes)}")


def _read(kubernetes: Kubernetes, *options: str) -> str:
    try:
        return kubernetes.run(*_LOG, *options)
    except shell.CommandFailed as error:
        # The API server is down, or the pod has no previous container.
        return f"{error}\n"


def _lines(log: str) -> Iterator[Line]:
    for text in log.splitlines():
        if text.startswith("{"):
            try:
                yield json.loads(text)
            except ValueError:
                continue  # a line that was cut off


def _time(line: Line) -> datetime:
    return datetime.fromisoformat(line["timestamp"])
