"""Many lives in parallel, each compared with an undisturbed one."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target, surely_reached
from tests.integration.operator.chaos.support.life import Life, Story
from tests.integration.operator.chaos.support.proxy import Proxy
from tests.support.cluster import CHILD_PATHS
from tests.support.installed import make_namespace
from tests.support.operator_process import Operator
from tests.support.patience import wait_for

# Twice the number of processors, because a life waits half of its time.
AT_A_TIME = 2 * (os.cpu_count() or 1)
RESTARTING = {Kind.KILL_BEFORE, Kind.KILL_AFTER, Kind.ANSWER_404, Kind.ANSWER_409, Kind.ANSWER_410, Kind.ERROR_500}
"""Faults after which the operator may be restarted: kopf ends the operator after these answers to its own read
requests, and after an error other than 410 on its own watch."""


@dataclass(frozen=True)
class Undisturbed:
    story: Story
    counts: Counter[Target]


@dataclass(frozen=True)
class Lives:
    """Creates lives. `upstream` is the API server with the operator's credentials; logs are written to `folder`."""

    admin: client.ApiClient
    upstream: client.Configuration
    folder: Path

    @contextmanager
    def life(self, name: str, *faults: Fault) -> Iterator[Life]:
        cluster = make_namespace(self.admin, name)
        with Proxy(self.upstream, faults) as proxy:
            kubeconfig = proxy.write_kubeconfig(self.folder / f"{name}.kubeconfig")
            operator = Operator(kubeconfig, name, self.folder / f"{name}.log")
            proxy.kill = operator.kill
            try:
                yield Life(cluster, proxy, operator)
            finally:
                if operator.is_running:
                    operator.kill()

    def undisturbed(self) -> Undisturbed:
        with self.life("undisturbed") as life:
            return Undisturbed(life.live(), life.proxy.counts)

    def complaints(self, faults: Sequence[Fault], calm: Undisturbed) -> list[str]:
        """Return one complaint for each life different from the undisturbed one. Prints the progress."""
        good: list[Life] = []

        def complaint(number: int) -> str:
            with self.life(f"life-{number}", faults[number]) as life:
                said = _complaint(life, faults[number], calm)
            if not said:
                good.append(life)
            hit = f"{faults[number]} ({life.proxy.struck or 'it never came to that'})"
            print(f"{number + 1} of {len(faults)}: {hit}: {said or 'ok'}", flush=True)
            return said and f"{hit}: {said}"

        with ThreadPoolExecutor(AT_A_TIME) as pool:
            found = list(pool.map(complaint, range(len(faults))))
        wait_for("the end of all children", lambda: not _children(good), lambda: _children(good))
        return [said for said in found if said]


def _complaint(life: Life, fault: Fault, calm: Undisturbed) -> str:
    try:
        story = life.live()
    except (pytest.fail.Exception, client.ApiException) as error:
        return str(error)
    if life.starts > 1:
        story = _with_lost_events(story, calm.story)
    if story != calm.story:
        return f"{_difference(story, calm.story)}\n{life.explain()}"
    seen = max(life.proxy.counts[fault.target], surely_reached(calm.counts[fault.target]))
    if not life.proxy.struck and fault.number <= seen:
        return f"it was not injected, of {dict(life.proxy.counts)}"
    if life.starts > 1 and fault.kind not in RESTARTING:
        return f"the operator had to be started {life.starts} times\n{life.explain()}"
    # The operator logs unforeseen errors with their place in the code.
    return "\n".join(line for line in life.operator.log.read_text().splitlines() if _is_surprise(line))


def _with_lost_events(story: Story, calm: Story) -> Story:
    """Add the lost events: events are best effort, so a dying operator loses its pending ones."""
    lost = Counter({what: count for what, count in (calm.created - story.created).items() if what[0] == "Event"})
    return Story(story.end, story.created + lost)


def _difference(story: Story, calm: Story) -> str:
    lost, more = calm.created - story.created, story.created - calm.created
    ends = {key: (story.end[key], calm.end[key]) for key in calm.end if story.end[key] != calm.end[key]}
    return f"lost {dict(lost)}, more {dict(more)}, at the end {ends}"


def _is_surprise(line: str) -> bool:
    return '"pass_failed"' in line and '"exception"' in line


def _children(lives: Sequence[Life]) -> list[str]:
    left = (child for life in lives for path in CHILD_PATHS for child in life.job.children(path))
    return [f"{child['metadata']['namespace']}/{child['metadata']['name']}" for child in left]
