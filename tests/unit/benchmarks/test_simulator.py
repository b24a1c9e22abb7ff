import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pseudoreal_api.names import LABEL_JOB

from benchmarks.operator import simulator
from benchmarks.operator.simulator import OURS, Simulator

Json = dict[str, Any]


def pod(name: str) -> Json:
    return {"metadata": {"name": name, "uid": f"uid of {name}", "labels": {LABEL_JOB: "job"}}}


class EndingWatches:
    """An API server that ends each watch; every watch starts with the pods that exist by then."""

    def __init__(self, *watches: list[str]) -> None:
        self._watches = list(watches)
        self.patched: list[str] = []
        self.all_watched = asyncio.Event()

    async def watch(self, _path: str, _selector: str) -> AsyncIterator[tuple[str, Json]]:
        if not self._watches:
            self.all_watched.set()
            await asyncio.Event().wait()
        for name in self._watches.pop(0):
            yield "ADDED", pod(name)

    async def request(self, _method: str, path: str, *_args: object, **_query: str) -> Json:
        self.patched.append(path.split("/")[-2])
        return {}


def test_pods_that_came_after_a_watch_ended_run_too_and_none_is_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "RUN_SECONDS", 0.0)

    async def run() -> list[str]:
        server = EndingWatches(["a"], ["a", "b"], ["a", "b"])
        simulated = Simulator(server, "load", OURS)  # type: ignore[arg-type]
        async with simulated.running():
            await server.all_watched.wait()
            simulated.check()
            while simulated.started < 2:
                await asyncio.sleep(0)
        return server.patched

    assert asyncio.run(asyncio.wait_for(run(), 10)) == ["a", "b"]
