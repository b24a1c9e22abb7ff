"""Outcomes of a pod's ranks, passed to the supervisor through small files, and the pod's termination message."""

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pseudoreal_api.base import ApiModel
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_api.wire.messages import TERMINATION_MESSAGE_BYTES, Outcome, TerminationMessage

from pseudoreal_trainer.cgroups import PodMemory
from pseudoreal_trainer.runtime.failures import Crash, killed_sentence

OUTCOME_DIRECTORY = "PSEUDOREAL_OUTCOME_DIRECTORY"
TERMINATION_LOG = "PSEUDOREAL_TERMINATION_LOG"

_KUBERNETES_TERMINATION_LOG = "/dev/termination-log"


class RankOutcome(ApiModel):
    """Termination message of one rank. `time_ns`: time of the message, in nanoseconds since the epoch."""

    local_rank: int
    time_ns: int
    message: TerminationMessage


def termination_message(
    outcome: Outcome,
    config: PhaseConfig | DelinkConfig,
    text: str,
    suspect: int | None = None,
    *,
    peer_lost: bool = False,
) -> TerminationMessage:
    return TerminationMessage(
        outcome=outcome,
        phase=config.phase,
        execution=config.execution,
        message=text[:2000],
        suspect=suspect,
        peer_lost=peer_lost,
    )


def write_outcome(folder: Path, local_rank: int, message: TerminationMessage) -> None:
    outcome = RankOutcome(local_rank=local_rank, time_ns=time.time_ns(), message=message)
    unfinished = folder / f"{local_rank}.outcome"
    unfinished.write_text(outcome.to_json(), encoding="utf-8")
    # Atomic: a rank that is killed during the write leaves no outcome.
    unfinished.rename(_outcome_file(folder, local_rank))


def read_outcome(folder: Path, local_rank: int) -> RankOutcome | None:
    """Return the outcome of a rank; None if the rank has left no outcome."""
    path = _outcome_file(folder, local_rank)
    return RankOutcome.model_validate_json(path.read_bytes()) if path.exists() else None


def collect_outcomes(folder: Path) -> list[RankOutcome]:
    return [RankOutcome.model_validate_json(path.read_bytes()) for path in folder.glob("*.json")]


def _outcome_file(folder: Path, local_rank: int) -> Path:
    return folder / f"{local_rank}.json"


def has_failed(outcome: RankOutcome) -> bool:
    return outcome.message.outcome in ("Failed", "InvalidJob", "OutOfMemory")


def pod_outcome(
    outcomes: list[RankOutcome],
    config: PhaseConfig,
    exit_code: int,
    stopped: bool,
    exhausted: PodMemory | None = None,
    ended: Collection[int] = (),
    crashes: Mapping[int, Crash] | None = None,
) -> TerminationMessage:
    """Return the pod's termination message, from the outcomes of all its ranks. Pure.

    `exit_code`: torchrun's exit code. `stopped`: whether the pod was asked to stop. `exhausted`: the pod's memory if
    the OOM killer has ended a process, else None. `ended`: local ranks killed by the pod itself after another rank was
    gone. `crashes`: local rank -> crash.

    Of several errors, InvalidJob and OutOfMemory come first, then failures caused in a rank itself, then lost peers: a
    first failure makes other ranks lose a peer. Among equals, the earliest counts. A killed rank leaves no outcome.
    """
    errors = [o for o in outcomes if has_failed(o)]
    silent = _silent(outcomes, config, ended)
    # InvalidJob and OutOfMemory sort before Failed, then own errors before lost peers, then by time.
    errors.sort(key=lambda o: (o.message.outcome == "Failed", o.message.peer_lost, o.time_ns))
    first_error = errors[0].message if errors else None
    if not silent and not outcomes:
        return termination_message(
            "Failed", config, "its ranks were ended, as another pod had lost one", peer_lost=True
        )
    if not silent:
        return first_error or min(outcomes, key=lambda o: o.local_rank).message
    crashed = {rank: crash for rank, crash in (crashes or {}).items() if rank in silent}
    killed = [rank for rank in silent if rank not in crashed]
    if killed and exhausted is not None:
        return termination_message("OutOfMemory", config, killed_sentence(killed, exhausted, config))
    if stopped:
        return termination_message("Yielded", config, "asked to stop before anything could be saved")
    if first_error is not None and first_error.outcome in ("InvalidJob", "OutOfMemory"):
        return first_error
    others = f"; another rank then said: {first_error.message}" if first_error else ""
    return termination_message(
        "Failed",
        config,
        f"{_silent_sentence(killed, crashed, config, exit_code)}{others}",
        first_error.suspect if first_error else None,
        # A timed-out collective can be the fault of any rank, here or in another pod; a killed rank is a fault of this
        # pod.
        peer_lost=not killed and all(crash.is_of_watchdog for crash in crashed.values()),
    )


def is_death(
    message: TerminationMessage,
    outcomes: list[RankOutcome],
    config: PhaseConfig,
    exit_code: int,
    stopped: bool,
    ended: Collection[int] = (),
) -> bool:
    """Return whether ranks ended because a process died, in this pod or in a connected pod. Pure.

    `message` is the result of `pod_outcome`. Running out of memory, an error reported by a rank, and a killed torchrun
    do not count as deaths.
    """
    if stopped or exit_code < 0 or message.outcome != "Failed":
        return False
    return message.peer_lost or bool(_silent(outcomes, config, ended))


def _silent(outcomes: list[RankOutcome], config: PhaseConfig, ended: Collection[int]) -> list[int]:
    """Return the local ranks without an outcome, except the ranks killed by the pod."""
    return sorted(set(range(config.processes_per_worker)) - {o.local_rank for o in outcomes} - set(ended))


def _silent_sentence(killed: list[int], crashed: Mapping[int, Crash], config: PhaseConfig, exit_code: int) -> str:
    """Return the sentence about the ranks without an outcome. `killed`: local ranks that were killed. `crashed`: local
    rank -> crash.

    Killed ranks come first, as the likely cause.
    """
    sentences = []
    if killed and exit_code < 0:
        # The ranks may live on for a moment: the signal to torchrun need not have gone to the ranks.
        sentences.append(f"torchrun was killed (signal {-exit_code}), and with it local rank {_list_ranks(killed)}")
    elif killed:
        sentences.append(
            f"local rank {_list_ranks(killed)} ended without a message, as a killed process does (for instance one that"
            f" used too much memory); torchrun's exit code is {exit_code}"
        )
    if waiting := [rank for rank, crash in crashed.items() if crash.is_of_watchdog]:
        limit = "" if config.collective_seconds is None else f" after {config.collective_seconds} s"
        sentences.append(
            f"local rank {_list_ranks(waiting)}: a collective timed out{limit} (NCCL watchdog), as some rank did not"
            " take part in it"
        )
    for rank, crash in crashed.items():
        if not crash.is_of_watchdog:
            sentences.append(f"local rank {rank} crashed ({crash.what}) in {crash.where or 'a thread without Python'}")
    return "; ".join(sentences)


def _list_ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def write_termination(message: TerminationMessage) -> None:
    """Write the message to the file named by TERMINATION_LOG, else to the kubelet's; do nothing if the latter does not
    exist, as outside of a cluster."""
    named = os.environ.get(TERMINATION_LOG)
    path = Path(named or _KUBERNETES_TERMINATION_LOG)
    if named or path.exists():
        path.write_text(_shortened(message).to_json(), encoding="utf-8")


def _shortened(message: TerminationMessage) -> TerminationMessage:
    while len(message.to_json().encode()) > TERMINATION_MESSAGE_BYTES:
        message = message.model_copy(update={"message": message.message[: len(message.message) // 2]})
    return message
