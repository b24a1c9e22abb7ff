"""Watches of a simulated cluster, with delays of any length: Jobs and pods are told in their own order, and later than
they happen."""

import copy
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.lifecycle.routine import is_routine, rests_on_successes
from pseudoreal_operator.observe.fetch import MEMORY_BEHIND
from pseudoreal_operator.observe.memory import KINDS, Memory

from tests.unit.operator.support.world import SETTINGS, UID, World

Json = dict[str, Any]


@dataclass
class Watches:
    """The memory of an operator, and the changes that each watch has yet to tell it. `world.plan` begins with the
    memory, as passes do."""

    world: World
    memory: Memory = field(default_factory=Memory)
    sources: list[str] = field(default_factory=list)
    """Source of each plan that was made: memory, pods (from memory) or live."""
    is_prompt: bool = False
    """Whether everything is told before each pass."""

    def __post_init__(self) -> None:
        self._name = Name("default", self.world.job.metadata.name)
        self._happened: dict[str, dict[str, Json]] = {kind: {} for kind in KINDS}
        self.untold: dict[str, deque[tuple[str, Json]]] = {kind: deque() for kind in KINDS}
        self._versions = count(1)
        self._version = 0
        for kind in KINDS:
            self.list_again(kind)
        self.world.watches = self

    def happen(self) -> None:
        """Note what has happened since the last call, as changes for the watches to tell."""
        for kind in KINDS:
            present = self._present(kind)
            known = self._happened[kind]
            for uid in [uid for uid in known if uid not in present]:
                self._note(kind, "DELETED", known.pop(uid))
            for uid, body in present.items():
                if uid not in known or _without_version(known[uid]) != _without_version(body):
                    change = "MODIFIED" if uid in known else "ADDED"
                    known[uid] = self._note(kind, change, copy.deepcopy(body))
                body["metadata"]["resourceVersion"] = known[uid]["metadata"]["resourceVersion"]

    def _note(self, kind: str, change: str, body: Json) -> Json:
        self._version = next(self._versions)
        body = body | {"metadata": body["metadata"] | {"resourceVersion": str(self._version)}}
        self.untold[kind].append((change, body))
        return body

    def _present(self, kind: str) -> dict[str, Json]:
        objects = self.world.objects.items()
        bodies = [body for (one, _), body in objects if one == kind] if kind == "Job" else [*self.world.pods.values()]
        for body in bodies:
            body["metadata"].setdefault("namespace", "default")
            body["metadata"].setdefault("uid", f"{kind}-{next(self._versions)}")
        return {body["metadata"]["uid"]: body for body in bodies}

    # Watches.

    def tell(self, kind: str, most: int = 10**9) -> None:
        """Let a watch tell the oldest changes that it has yet to tell, if it is connected."""
        self.happen()
        watch = self.memory.watch(kind, None)
        while self.untold[kind] and most and watch.is_current:
            change, body = self.untold[kind].popleft()
            self.memory.child_changed(kind, change, body)
            watch.told(body["metadata"]["resourceVersion"])
            most -= 1

    def tell_all(self) -> None:
        for kind in KINDS:
            self.resume(kind)
            self.tell(kind)

    def cut(self, kind: str) -> None:
        self.memory.watch(kind, None).cut()

    def resume(self, kind: str) -> None:
        """Connect again; the watch goes on with the change after the last that it has told."""
        self.memory.watch(kind, None).connected()

    def list_again(self, kind: str) -> None:
        """Connect again after the API server has forgotten the changes."""
        self.happen()
        self.untold[kind].clear()
        watch = self.memory.watch(kind, None)
        watch.cut()
        listing = watch.list_again()
        for body in self._happened[kind].values():
            listing.add(body)
        listing.finish(str(self._version + 1))
        self._version = next(self._versions)
        watch.connected()

    # The operator.

    def die(self) -> None:
        """Forget all; the next operator lists everything."""
        self.memory = Memory()
        for kind in KINDS:
            self.list_again(kind)

    def plan(self) -> Plan:
        """Plan as a pass does: from memory, and again with what is read if the plan is not routine."""
        if self.is_prompt:
            self.tell_all()
        self.happen()
        status, is_success = self.world.status, False
        if all(self.memory.is_current(kind, self._name) for kind in KINDS):
            wanted = self._plan(self._remembered("Job"), self._remembered("Pod"), is_live=False)
            if is_routine(wanted, status):
                self.sources.append("memory")
                return wanted
            is_success = rests_on_successes(wanted, status)
        jobs = self._read("Job")
        if is_success and self.memory.is_current("Pod", self._name):
            wanted = self._plan(jobs, self._remembered("Pod"), is_live=False)
            if rests_on_successes(wanted, status):
                self.sources.append("pods")
                return wanted
        self.sources.append("live")
        return self._plan(jobs, self._read("Pod"), is_live=True)

    def _plan(self, jobs: list[Any], pods: list[Any], *, is_live: bool) -> Plan:
        behind = MEMORY_BEHIND * (not is_live)
        return plan(self.world.observe(read=(jobs, pods), behind=behind), self.world.now, SETTINGS)

    def _remembered(self, kind: str) -> list[Any]:
        known = self.memory.children(self._name, UID)
        assert known is not None, "every child can be read"
        return [*known.jobs] if kind == "Job" else [pod for pods in known.pods.values() for pod in pods]

    def _read(self, kind: str) -> list[Any]:
        versions = {uid: int(body["metadata"]["resourceVersion"]) for uid, body in self._present(kind).items()}
        self.memory.was_read(kind, self._name, versions, self._version)
        return self.world.read(kind)

    def check(self, wanted: Plan) -> None:
        """Check that a plan whose effects cannot be undone is the plan for the objects as they are now."""
        status = self.world.status
        if not is_routine(wanted, status) and not rests_on_successes(wanted, status):
            live = plan(self.world.observe(), self.world.now, SETTINGS)
            assert wanted == live, "what cannot be undone is decided on the objects themselves"

    def wrote(self, kind: str, name: str) -> None:
        """Note the answer of the API server to a write."""
        self.happen()
        found = next((body for body in self._present(kind).values() if body["metadata"]["name"] == name), None)
        if found is not None:
            self.memory.wrote(kind, self._name, found)

    def deleted(self, kind: str, name: str) -> None:
        self.memory.deleted(kind, self._name, {name})


def _without_version(body: Json) -> Json:
    return body | {"metadata": {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}}
