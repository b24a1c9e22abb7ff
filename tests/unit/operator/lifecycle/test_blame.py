"""Blame: in every order of ends and of termination messages, the pod where the fault began is named, never a
witness."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS
from pseudoreal_operator.status.conditions import find

from tests.support.depth import DEPTH
from tests.unit.operator.lifecycle.support.steps import run_until
from tests.unit.operator.support.world import World, make_job

Json = dict[str, Any]
TRIALS = DEPTH.of(10, 300)
SPOKEN = ORIGIN_SECONDS - 2
"""Seconds after which the pod where the fault began has ended and the operator has made a pass."""


def killed_torchrun(world: World, pod: Json) -> None:
    world.finish(pod, "Failed")


def killed_main_process(world: World, pod: Json) -> None:
    """Kubernetes then shows the end of the log as the termination message."""
    world.finish(pod, exit_code=137, reason="Error", message='{"event": "progress", "step": 7}')


def killed_by_the_kernel(world: World, pod: Json) -> None:
    world.finish(pod, exit_code=137, reason="OOMKilled")


def out_of_memory(world: World, pod: Json) -> None:
    world.finish(pod, "OutOfMemory")


def exception(world: World, pod: Json) -> None:
    world.finish(pod, "Failed")


def evicted(world: World, pod: Json) -> None:
    """The kubelet reports nothing about the pod's container."""
    world.disrupt(pod, "TerminationByKubelet")


def node_lost(_: World, pod: Json) -> None:
    pod["status"] = {"phase": "Failed", "reason": "NodeLost"}


def node_tainted(world: World, pod: Json) -> None:
    """The pod is to be deleted, but no kubelet does it."""
    world.lose(pod)


def node_off(_: World, pod: Json) -> None:
    """Kubernetes has not noticed it yet, which takes minutes; and when the Job is failed, the pod does not end."""
    pod["lost"] = True


def node_deleted(world: World, pod: Json) -> None:
    """The node is deleted with its pods, which leave no trace."""
    world.vanish(pod)


COUNTED: dict[Callable[[World, Json], None], str] = {
    killed_torchrun: "PodFailed",
    killed_main_process: "PodFailed",
    killed_by_the_kernel: "OutOfMemory",
    out_of_memory: "OutOfMemory",
    exception: "PodFailed",
}
KINDS: list[Callable[[World, Json], None]] = [*COUNTED, evicted, node_lost, node_tainted, node_off, node_deleted]


class Trial:
    """A job with `pods` pods; the fault begins in one of them."""

    def __init__(self, pods: int, chance: random.Random) -> None:
        phase = {"name": "real", "until": {"step": 10}, "batch": {"sequences": 8}, "workers": pods}
        self.world = run_until(World(make_job(spec__phases=[phase], spec__restart={"backoffSeconds": 9999})), "real")
        self.chance = chance
        self.pods = self.world.alive()
        for index, pod in enumerate(self.pods):
            pod["spec"] = {"nodeName": f"node-{index}"}
        self.victim = chance.randrange(pods)
        self.name = str(self.pods[self.victim]["metadata"]["name"])

    def run(self, begin: Callable[[World, Json], None]) -> None:
        """Let the fault happen. Some of the other pods notice, before or after; the operator ends those that do not."""
        others = [pod for pod in self.pods if pod is not self.pods[self.victim]]
        witnesses = self.chance.sample(others, self.chance.randint(1, len(others)))
        acts: list[Callable[[], object]] = [partial(begin, self.world, self.pods[self.victim])]
        acts += [partial(self._loses_its_peer, pod) for pod in witnesses]
        self.chance.shuffle(acts)
        for act in acts:
            act()
            self._pass_some_time(SPOKEN / len(acts))
        for _ in range(200):
            if self.world.status.execution > 1:
                return
            self._pass_some_time(2)
        raise AssertionError(f"nothing follows: {self.world.status}")

    def _loses_its_peer(self, pod: Json) -> None:
        if pod in self.world.alive():
            self.world.finish(pod, "Failed", peer_lost=True)

    def _pass_some_time(self, seconds: float) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.chance.choice([self.world.control, self._look])()
        self.world.tick(seconds)
        self._look()
        self.world.control()

    def _look(self) -> None:
        self.world.carry_out(self.world.plan())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pods", [2, 4])
def test_event_names_the_pod_in_which_the_failure_began(pods: int, kind: Callable[[World, Json], None]) -> None:
    for number in range(TRIALS):
        trial = Trial(pods, DEPTH.chance(f"{kind.__name__} {pods} {number}"))
        trial.run(kind)
        status, said = trial.world.status, find(trial.world.status, "Progressing")
        assert said
        assert list(trial.world.events.values()).count("ExecutionFailed") == 1
        # One that left nothing has no name any more.
        name = trial.name if kind is not node_deleted else f"The pod of worker {trial.victim} of "
        assert said.message.removeprefix("Pod ").startswith(name), (number, said.message)
        faults = [(fault.reason, fault.pod, fault.node) for fault in status.faults]
        counted = COUNTED.get(kind)
        assert faults == ([(counted, trial.name, f"node-{trial.victim}")] if counted else []), number
        assert status.restarts == len(faults), "what is wrong with a node does not count"
