"""One start of a pod's ranks, from the rendezvous of the pods to the end of all ranks of this pod."""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.accelerator.environment import accelerator_environment
from pseudoreal_trainer.cgroups import exhausted, pod_memory, threads_of
from pseudoreal_trainer.runtime.failures import read_crashes
from pseudoreal_trainer.runtime.heartbeat import Clock, process_state, read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import MEMBERSHIP, PodFolder
from pseudoreal_trainer.runtime.rendezvous.identity import (
    RendezvousIdentity,
    await_worker_0,
    rendezvous,
    rendezvous_deadline,
)
from pseudoreal_trainer.runtime.stop import Stop
from pseudoreal_trainer.runtime.termination import (
    OUTCOME_DIRECTORY,
    collect_outcomes,
    has_failed,
    is_death,
    pod_outcome,
    read_outcome,
)

LAST_SECONDS = 2.0
"""Seconds that the remaining ranks get to write their outcomes, after a rank has died."""
_DEAD = ("Z", "X")

log = structlog.get_logger()


class LocalRanks:
    """The local ranks of a pod, found through their heartbeat files.

    `killed`: local ranks that this object has killed; these ranks are not at fault.
    """

    def __init__(self, folder: PodFolder, clock: Clock = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._died_since: float | None = None
        self.killed: set[int] = set()

    def check(self) -> None:
        """Kill all ranks `LAST_SECONDS` after the first call that finds a killed or failed rank. Call repeatedly."""
        now = self._clock()
        if self._died_since is None and any(self._has_died(*rank) for rank in self._ranks()):
            self._died_since = now
        if self._died_since is not None and now - self._died_since >= LAST_SECONDS:
            self.kill_all("another rank of this pod is gone")

    def are_dead(self) -> bool:
        """Return whether all ranks are dead."""
        return all(process_state(pid) in _DEAD for _, pid in self._ranks())

    def _has_died(self, local_rank: int, pid: int) -> bool:
        """Return whether the rank is dead, and was killed or has failed."""
        if process_state(pid) not in _DEAD:
            return False
        outcome = read_outcome(self._folder.path, local_rank)
        return outcome is None or has_failed(outcome)

    def kill_all(self, why: str) -> None:
        """Kill the surviving ranks."""
        for local_rank, pid in self._ranks():
            if local_rank not in self.killed and process_state(pid) not in _DEAD:
                self.killed.add(local_rank)
                log.warning("rank_ended", local_rank=local_rank, why=why)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _ranks(self) -> Iterator[tuple[int, int]]:
        """Yield local rank and process id of each started rank."""
        for path in self._folder.heartbeats():
            if (record := read_heartbeat(path)) is not None:
                yield int(path.stem), record.pid


SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_SHUTDOWN_SECONDS = 3600
"""Seconds from a SIGTERM until torchrun kills its ranks (torchrun's default: 30 s): time for the current step and a
save. In a pod, the operator sets the variable to less than the pod's grace period."""
_LOOK_SECONDS = 0.5
"""Seconds between two checks of the ranks."""


@dataclass(frozen=True)
class Launch:
    """Configuration of a pod's ranks, the same for every start. `worker`: Python module that every rank runs. `file`:
    path of the phase's configuration file, the module's argument."""

    config: PhaseConfig
    file: Path
    worker: str
    folder: PodFolder
    stop: Stop

    @property
    def index(self) -> int:
        """Completion index of the pod."""
        return int(os.environ.get("PET_NODE_RANK", "0"))

    def has_newer_membership(self, identity: RendezvousIdentity) -> bool:
        """Return whether the operator has announced a membership for a restart after `identity.restart`."""
        membership = self.folder.membership()
        return membership is not None and membership.restart > identity.restart


@dataclass(frozen=True)
class RanksResult:
    """Result of one start of a pod's ranks. `may_restart`: whether the ranks may be restarted in place; if true, all
    ranks are dead."""

    message: TerminationMessage
    may_restart: bool


def run_ranks(launch: Launch, identity: RendezvousIdentity) -> RanksResult | None:
    """Run the pod's ranks from the rendezvous to their end, and return how they ended.

    None: no rank has started, because the pods have not met in time for a restart, or the operator has announced a
    later restart.
    """
    environment = torchrun_environment(launch.config, launch.folder, identity)
    end = rendezvous_deadline(launch.config, identity)
    met = await_worker_0(environment, lambda: _should_give_up(launch, identity, end))
    if not met and (identity.restart or launch.has_newer_membership(identity)):
        return None
    # The counts of OOM kills before and after the run tell whether a rank was killed for memory.
    before, local_ranks = pod_memory(), LocalRanks(launch.folder)
    exit_code = _run_torchrun(launch, environment, local_ranks, identity)
    if not launch.folder.has_ranks() and (identity.restart or launch.has_newer_membership(identity)):
        return None
    config, outcomes = launch.config, collect_outcomes(launch.folder.path)
    crashes = read_crashes(launch.folder.path, config.processes_per_worker)
    lacked, stopped = exhausted(before, pod_memory()), launch.stop.asked
    message = pod_outcome(outcomes, config, exit_code, stopped, lacked, local_ranks.killed, crashes)
    # A restart needs a cause: a death, or a yield beside a spare. All earlier ranks must be dead: a living rank could
    # still send messages.
    died = is_death(message, outcomes, config, exit_code, stopped, local_ranks.killed)
    return RanksResult(message, (died or _yielded_beside_a_spare(message, config, stopped)) and local_ranks.are_dead())


def _should_give_up(launch: Launch, identity: RendezvousIdentity, end: float) -> bool:
    return launch.stop.asked or time.monotonic() > end or launch.has_newer_membership(identity)


def _yielded_beside_a_spare(message: TerminationMessage, config: PhaseConfig, stopped: bool) -> bool:
    """Return whether the job has spare pods, and all ranks saved and ended because another pod was asked to stop. A
    spare may replace the other pod."""
    return config.spares > 0 and message.outcome == "Yielded" and not stopped


def torchrun_environment(config: PhaseConfig, folder: PodFolder, identity: RendezvousIdentity) -> dict[str, str]:
    """Return the environment of torchrun: the pod's own environment, with defaults for missing variables. PET_*
    variables reach torchrun unchanged, unless `rendezvous` sets them."""
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
        | accelerator_environment(config)
        | dict(os.environ)
        | rendezvous(os.environ, config, identity)
        | {OUTCOME_DIRECTORY: str(folder.path), MEMBERSHIP: str(identity.membership)}
    )


def _run_torchrun(
    launch: Launch, environment: dict[str, str], local_ranks: LocalRanks, identity: RendezvousIdentity
) -> int:
    """Run torchrun and return its exit code. After the death of a rank, torchrun would give the remaining ranks 30 s
    to end; `local_ranks` kills them after `LAST_SECONDS`."""
    process = start_torchrun(["--max-restarts", "0", "--module", launch.worker, str(launch.file)], environment)
    launch.stop.pass_on_to(process)
    while True:
        process.join(_LOOK_SECONDS)
        if process.exitcode is not None:
            return process.exitcode
        # Ranks of this pod may wait forever for the killed ranks of a restarting pod: the supervisor ends them.
        if launch.folder.restarts_elsewhere() > identity.restart:
            local_ranks.kill_all("another pod restarts its ranks in place")
        if launch.has_newer_membership(identity):
            local_ranks.kill_all("a spare pod has taken a place")
            if not launch.folder.has_ranks():
                process.terminate()  # torchrun waits for a pod that never arrives
        local_ranks.check()


# On macOS, a process that has imported torch must not be forked: its system libraries have threads of their own.
_CONTEXT = get_context("forkserver") if sys.platform == "linux" else get_context("spawn")
_IMPORTED = ["pseudoreal_trainer.cli.pod", "pseudoreal_trainer.runtime.rendezvous.handler"]


def prepare_torchrun() -> None:
    """Import torch in the process from which torchrun will be forked, so that a spare pod can start its ranks without
    delay."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_do_nothing, name="prepares-torchrun")
    process.start()
    process.join()


def _do_nothing() -> None:
    """Do nothing: the fork server, parent of this process, has imported everything by now."""


def start_torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> BaseProcess:
    """Start and return a torchrun with exactly this environment; the process ends with torchrun's exit code."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_run, args=(list(arguments), dict(environment)), name="torchrun")
    process.start()
    return process


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    from pseudoreal_trainer.runtime.rendezvous.handler import run

    os.environ.clear()
    os.environ.update(environment)
    run(arguments)
