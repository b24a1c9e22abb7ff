"""The history of a job: when its stages started and ended, why, and on which pod and node.

`history/` beside `checkpoints/` has one small file for each entry, because object storage cannot append. The first rank
records each start of a phase; a pod records its end if the fault was its own, and the pod of worker 0 always does. So a
restart costs two or three files, however many pods there are. A pod that is killed, or whose node is lost, records
nothing: the other entries then show the gap.

The history is for people. Nothing that trains reads it, and a write that fails or hangs ends nothing.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Literal

import structlog
from pseudoreal_api.base import ApiModel
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_api.wire.messages import InPlace, TerminationMessage
from pseudoreal_api.wire.reports import NODE_NAME
from pydantic import ConfigDict, Field, JsonValue

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.runtime.heartbeat import read_heartbeat
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.storage.storage import storage_of

HISTORY = "history"
"""Name of the folder, beside `checkpoints/`."""
_WRITE_SECONDS = 10.0
"""Longest wait in seconds for the write of a start or an end, because the volume may hang."""

log = structlog.get_logger()


class HistoryEntry(ApiModel):
    """Start or end of a stage, or a restart of its ranks in place."""

    # A later release may write more fields.
    model_config = ConfigDict(extra="ignore")

    event: Literal["Started", "RestartedInPlace", "Ended"] = Field(description="What happened.")
    time: float = Field(description="When, in seconds since the epoch, by the clock of the pod's node.")
    stage: Literal["train", "delink"] = Field(description="Training of a phase, or the delink that leads into it.")
    phase: str = Field(description="Name of the phase.")
    execution: int = Field(description="Number of the execution.")
    restart: int = Field(0, description="Number of the newest restart in place in this execution.")
    pod: str = Field(description="Host name of the pod.")
    node: str | None = Field(None, description="Name of the node. None: the pod does not know it, as on a laptop.")
    ranks: list[int] = Field([], description="Ranks in this pod, as far as they had started.")
    step: int = Field(0, description="Steps done, from the job's start.")
    checkpoint: str | None = Field(None, description="Started: that training goes on from. Ended: the newest one.")
    outcome: str | None = Field(None, description="Outcome in the termination message of the pod.")
    message: str = Field("", description="For people: what went wrong and what to change.")
    suspect: int | None = Field(None, description="The rank at fault, where it is not one of this pod's own.")
    peer_lost: bool = Field(False, description="The pod ended as another one failed, or was gone.")
    config: dict[str, JsonValue] | None = Field(None, description="Started: the configuration of the phase.")


def record_start(config: PhaseConfig, step: int, checkpoint: str | None, restart: int) -> None:
    """Record that the ranks begin to train. `checkpoint`: name of the checkpoint they go on from; None: fresh
    weights. Waits at most `_WRITE_SECONDS`: all ranks wait for the first one's start."""
    entry = _entry("Started", config).model_copy(
        update={
            "step": step,
            "checkpoint": checkpoint,
            "restart": restart,
            "ranks": [int(os.environ.get("RANK", "0"))],
            "config": config.to_dict(),
        }
    )
    _write_in_thread(config, entry).join(_WRITE_SECONDS)


def record_restart_in_place(config: PhaseConfig, why: InPlace, ranks: Sequence[int]) -> None:
    """Record that this pod restarts its ranks in place, if the fault was its own. Does not wait for the storage."""
    if why.peer_lost:
        return
    entry = _entry("RestartedInPlace", config).model_copy(
        update={"restart": why.restarts, "message": why.message, "ranks": list(ranks), "outcome": "Failed"}
    )
    _write_in_thread(config, entry)


def record_end(config: PhaseConfig | DelinkConfig, message: TerminationMessage, ranks: Sequence[int] = ()) -> None:
    """Record the end of this pod, if the fault was its own or the pod is worker 0's. Waits at most `_WRITE_SECONDS`.

    Call after the termination message was written: the storage may hang.
    """
    own_fault = message.outcome not in ("Succeeded", "Yielded") and not message.peer_lost
    if not own_fault and os.environ.get("PET_NODE_RANK", "0") != "0":
        return
    entry = _entry("Ended", config).model_copy(
        update={
            "ranks": list(ranks),
            "step": message.step,
            "checkpoint": message.checkpoint,
            "outcome": message.outcome,
            "message": message.message,
            "suspect": message.suspect,
            "peer_lost": message.peer_lost,
            "restart": message.in_place.restarts if message.in_place else 0,
        }
    )
    _write_in_thread(config, entry).join(_WRITE_SECONDS)


def ranks_of(pod: PodFolder) -> list[int]:
    """Return the global ranks that have started in this pod, in order."""
    records = map(read_heartbeat, pod.heartbeats())
    return sorted(record.rank for record in records if record is not None)


def _entry(event: Literal["Started", "RestartedInPlace", "Ended"], config: PhaseConfig | DelinkConfig) -> HistoryEntry:
    return HistoryEntry(
        event=event,
        time=time.time(),
        stage=config.stage,
        phase=config.phase,
        execution=config.execution,
        pod=socket.gethostname(),
        node=os.environ.get(NODE_NAME) or None,
    )


def _write_in_thread(config: PhaseConfig | DelinkConfig, entry: HistoryEntry) -> threading.Thread:
    thread = threading.Thread(target=_write, args=(config, entry), name="history", daemon=True)
    thread.start()
    return thread


def _write(config: PhaseConfig | DelinkConfig, entry: HistoryEntry) -> None:
    folder = storage_path(config.storage) / HISTORY
    # Names sort by time; the pod's name keeps entries of the same nanosecond apart.
    name = f"{int(entry.time * 1e9):020d}-{entry.event.lower()}-{entry.pod}.json"
    try:
        storage_of(folder).make_folder()
        storage_of(folder / name).replace(entry.to_json())
    except (OSError, TrainingError) as error:
        log.warning("history_not_written", what=entry.event, error=str(error))
