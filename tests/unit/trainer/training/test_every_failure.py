"""Every call of a step or of a save may fail on one of two ranks: both ranks end at once and report the cause."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.support.depth import DEPTH
from tests.support.ports import free_port
from tests.support.processes import Forked, wait_for_all
from tests.unit.trainer.training.support import failing_call
from tests.unit.trainer.training.support.failing_call import SAYS

SECONDS = 10.0
"""Limit from the failure until both ranks have ended; gloo's own timeout is minutes."""
SAMPLE = 3
"""Failures tried per kind of job; the long test tries all."""
JOBS = [(home, clipping) for home in ("Host", "Disk") for clipping in ("Global", "PerUnit")]
BALANCED = {"type": "TopK", "count": 3, "topK": {"perToken": 1, "biasUpdateRate": "0.001"}}
SAVES = ("write of a checkpoint", "copy of a capture", "all_gather of a save", "commit")


class _Job:
    def __init__(self, config: Path, folder: Path) -> None:
        self._config, self._folder, self._numbers = config, folder, count()

    def run(self, name: str = "", number: int = 0, failing: int = 1) -> tuple[list[Path], list[int]]:
        """Run two ranks, where call number `number` of `name` fails on rank `failing`; return their folders and exit
        codes."""
        folders = [self._folder / f"{next(self._numbers)}-{rank}" for rank in (0, 1)]
        port = free_port()
        ranks = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            config = json.loads(self._config.read_text()) | {"workDirectory": str(folders[0] / "work")}
            (folder / "config").write_text(json.dumps(config))
            mine = number if rank == failing else 0
            arguments = (rank, port, folder / "config", folder, name, mine)
            ranks.append(Forked(failing_call.run, *arguments, log=folder / "log"))
        codes = wait_for_all(ranks)
        self.ended = monotonic()
        return folders, codes

    def calls(self) -> list[tuple[str, int]]:
        """Return the name and number of every call that rank 1 makes in the step when nothing fails."""
        folders, codes = self.run()
        assert codes == [0, 0], (folders[1] / "log").read_text()
        lines = [line.split(" ", 1) for line in (folders[1] / "counts").read_text().splitlines()]
        return [
            (name, number)
            for times, name in sorted(lines, key=lambda line: line[1])
            for number in range(1, int(times) + 1)
        ]

    def check(self, name: str, number: int, failing: int = 1) -> None:
        folders, codes = self.run(name, number, failing)
        said = [json.loads((folder / "0.json").read_text())["message"] for folder in folders]
        assert codes == [1, 1], f"{name} {number}: {codes}, {said}"
        assert SAYS in said[failing]["message"], f"{name} {number}: {said}"
        assert not said[failing].get("peerLost")
        assert said[1 - failing].get("peerLost"), f"{name} {number}: {said}"
        assert self.ended - float((folders[failing] / "failed").read_text()) < SECONDS, f"{name} {number}"


@pytest.fixture
def job(job_body: dict[str, Any], config: Any, tmp_path: Path) -> Callable[[str, str], _Job]:
    def make(home: str, clipping: str) -> _Job:
        job_body["spec"]["optimizer"]["clipping"] = {"mode": clipping}
        job_body["spec"]["checkpoint"] |= {"everySteps": 2, "mode": "Async"}
        if (home, clipping) == JOBS[-1]:
            # Top-k experts with a balancing bias add an all-reduce of the router counts at the end of a step.
            job_body["spec"]["model"]["experts"] = BALANCED
        job_body["spec"]["phases"][0] |= {
            "until": {"step": 5},
            "sharing": {"blocks": 4},
            "workers": 2,
            "parallelism": {"stateSharding": "Full", "schedule": "Layered"},
            "offload": {"home": home},
        }
        file = tmp_path / "config.json"
        file.write_text(config(0).to_json())
        return _Job(file, tmp_path)

    return make


@pytest.mark.parametrize(("home", "clipping"), JOBS)
def test_a_failure_at_some_calls_of_a_step_ends_the_rank(
    home: str, clipping: str, job: Callable[[str, str], _Job]
) -> None:
    found = job(home, clipping)
    for name, number in DEPTH.chance(f"{home} {clipping}").sample(found.calls(), SAMPLE):
        found.check(name, number)


def test_a_failed_commit_ends_the_rank(job: Callable[[str, str], _Job]) -> None:
    """Only rank 0 commits."""
    job("Host", "PerUnit").check("commit", 1, failing=0)


@pytest.mark.long
@pytest.mark.parametrize(("home", "clipping"), JOBS)
def test_a_failure_at_every_call_of_a_step_ends_the_rank(
    home: str, clipping: str, job: Callable[[str, str], _Job]
) -> None:
    found = job(home, clipping)
    calls = found.calls()
    # The snapshot copies may all be finished before the step starts.
    assert {name for name, _ in calls} >= {"all_reduce", "reduce_scatter", "all_gather", SAVES[0], SAVES[2]}
    for name, number in calls:
        found.check(name, number)
