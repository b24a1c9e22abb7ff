"""One start of a pod's ranks, from the rendezvous of the pods to the end of all ranks of this pod."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.gpu_environment import gpu_environment
from pseudoreal_trainer.runtime.crash import read_crashes
from pseudoreal_trainer.runtime.memory_use import exhausted, pod_memory
from pseudoreal_trainer.runtime.outcome import OUTCOME_DIRECTORY, collect_outcomes, is_death, pod_outcome
from pseudoreal_trainer.runtime.partners import Partners
from pseudoreal_trainer.runtime.place import Place
from pseudoreal_trainer.runtime.pod_folder import MEMBERSHIP, PodFolder
from pseudoreal_trainer.runtime.stop import Stop
from pseudoreal_trainer.runtime.torchrun import start_torchrun
from pseudoreal_trainer.runtime.worker_0 import await_worker_0, meets_until, rendezvous
from pseudoreal_trainer.threads import threads_of

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_SECONDS = 3600
"""Seconds between a SIGTERM and the moment at which torchrun kills its ranks (its default: 30 s): time for the current
step and a save. In a pod, the operator sets less than the kubelet would wait."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks at the ranks."""


@dataclass(frozen=True)
class Launch:
    """Configuration of a pod's ranks, the same for every start. `worker` is the module of a rank, `file` its
    configuration."""

    config: PhaseConfig
    file: Path
    worker: str
    folder: PodFolder
    stop: Stop

    @property
    def index(self) -> int:
        """Completion index of the pod."""
        return int(os.environ.get("PET_NODE_RANK", "0"))

    def is_told_more(self, place: Place) -> bool:
        """Return whether the operator has announced a restart after the place's restart."""
        membership = self.folder.membership()
        return membership is not None and membership.restart > place.restart


@dataclass(frozen=True)
class Ending:
    """End of a pod's ranks. `may_restart`: whether they may be restarted in place; then none of them is alive."""

    message: TerminationMessage
    may_restart: bool


def run_ranks(launch: Launch, place: Place) -> Ending | None:
    """Run the pod's ranks at a place and return how they ended. None: no rank has started, as the pods have not met in
    time for a restart, or the operator has announced a later one."""
    environment = torchrun_environment(launch.config, launch.folder, place)
    end = meets_until(launch.config, place)
    met = await_worker_0(environment, lambda: _gives_up(launch, place, end))
    if not met and (place.restart or launch.is_told_more(place)):
        return None
    before, partners = pod_memory(), Partners(launch.folder)
    exit_code = _run_torchrun(launch, environment, partners, place)
    if not launch.folder.has_ranks() and (place.restart or launch.is_told_more(place)):
        return None
    config, outcomes = launch.config, collect_outcomes(launch.folder.path)
    crashes = read_crashes(launch.folder.path, config.processes_per_worker)
    lacked, stopped = exhausted(before, pod_memory()), launch.stop.asked
    message = pod_outcome(outcomes, config, exit_code, stopped, lacked, partners.ended, crashes)
    died = is_death(message, outcomes, config, exit_code, stopped, partners.ended)
    return Ending(message, (died or _left_alone(message, config, stopped)) and partners.are_gone())


def _gives_up(launch: Launch, place: Place, end: float) -> bool:
    return launch.stop.asked or time.monotonic() > end or launch.is_told_more(place)


def _left_alone(message: TerminationMessage, config: PhaseConfig, stopped: bool) -> bool:
    """Return whether all ranks saved and ended because another pod was asked to stop, whose place a spare pod may
    take."""
    return config.spares > 0 and message.outcome == "Yielded" and not stopped


def torchrun_environment(config: PhaseConfig, folder: PodFolder, place: Place) -> dict[str, str]:
    """Return the environment of torchrun: the pod's own environment, with defaults for missing variables. PET_*
    variables reach torchrun unchanged, except for those that the place decides."""
    processes = config.processes_per_worker
    defaults = {
        "PET_NPROC_PER_NODE": str(processes),
        "OMP_NUM_THREADS": str(threads_of(processes)),
        # Threads that spin while they wait take CPU time from the other ranks on the machine.
        "OMP_WAIT_POLICY": "passive",
        SHUTDOWN_TIMEOUT: str(_SHUTDOWN_SECONDS),
    }
    return (
        defaults
        | gpu_environment(config)
        | dict(os.environ)
        | rendezvous(os.environ, config, place)
        | {OUTCOME_DIRECTORY: str(folder.path), MEMBERSHIP: str(place.membership)}
    )


def _run_torchrun(launch: Launch, environment: dict[str, str], partners: Partners, place: Place) -> int:
    """Run torchrun and return its exit code. torchrun gives ranks half a minute to end when one of them is gone;
    `partners` gives them less."""
    process = start_torchrun(["--max-restarts", "0", "--module", launch.worker, str(launch.file)], environment)
    launch.stop.pass_on_to(process)
    while True:
        process.join(_LOOK_SECONDS)
        if process.exitcode is not None:
            return process.exitcode
        if launch.folder.restarts_elsewhere() > place.restart:
            partners.end_all("another pod restarts its ranks in place")
        if launch.is_told_more(place):
            partners.end_all("a spare pod has taken a place")
            if not launch.folder.has_ranks():
                process.terminate()  # torchrun waits for a pod that does not come
        partners.look()
