"""One rank of a phase: `python -m pseudoreal_trainer.cli.rank CONFIG.json`, under torchrun or alone.

The exit codes are defined by the contract between operator and trainer. A rank that stops early on request (outcome
Yielded) must not exit with 0: torchrun would then wait minutes for the torchruns of the other pods, which may be gone.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import structlog
from pseudoreal_api.resolved.config import PhaseConfig, read_phase_config
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.cgroups import memory_use
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.preflight.start import run_preflight
from pseudoreal_trainer.runtime.failures import (
    enable_crash_files,
    has_lost_a_peer,
    lack_of_memory,
    rank_sentence,
    timeout_sentence,
)
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, HeartbeatFile
from pseudoreal_trainer.runtime.pod_folder import PodFolder, pod_folder
from pseudoreal_trainer.runtime.termination import termination_message, write_outcome

log = structlog.get_logger()


_LAST_SECONDS = 1.0
"""Time limit in seconds for a failing rank's report of the failure: the log may be a pipe without a reader."""


def main() -> NoReturn:
    # A normal exit would wait for every non-daemon thread and for exit handlers of third-party packages.
    _exit_now(run_rank(Path(sys.argv[1]), _exit_now).exit_code)


def run_rank(config_file: Path, end: Callable[[int], object]) -> TerminationMessage:
    """Train as one rank; return the rank's termination message, after writing it as the rank's outcome for the pod.

    `end`: function that ends the process with an exit code. The thread that fails first calls it without waiting for
    the other threads: these may be waiting for other ranks, and the other ranks for this rank.
    """
    stop = threading.Event()
    # Before torch is imported: the import takes seconds, during which a SIGTERM would otherwise kill the process.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    configure_logs()
    local_rank, pod = int(os.environ.get("LOCAL_RANK", "0")), pod_folder()
    if pod is not None:
        enable_crash_files(pod.path, local_rank)
    heartbeat = _heartbeat(pod, local_rank)  # before torch too, so that an import that hangs is detected
    config = read_phase_config(config_file)

    def leave(message: TerminationMessage) -> TerminationMessage:
        if pod is not None:
            write_outcome(pod.path, local_rank, message)
        heartbeat.ended()
        return message

    def fail(error: BaseException) -> None:
        message = _failure_message(config, error)
        with _exit_in_time(message.exit_code):
            leave(message)
            _log_failure(config, error)
            end(message.exit_code)

    heartbeat.failure.ends_with(fail)
    try:
        return leave(_train(config, config_file, stop, heartbeat, pod))
    except Exception as error:
        # If another thread has failed first, add() blocks until that thread has ended the process. Most failures were
        # already recorded where they occurred.
        heartbeat.failure.add(error)
        return _failure_message(config, error)


def _exit_now(exit_code: int) -> NoReturn:
    """End the process without waiting for its threads, unlike a normal exit."""
    with _exit_in_time(exit_code):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


@contextmanager
def _exit_in_time(exit_code: int) -> Iterator[None]:
    """End the process if the context lasts longer than `_LAST_SECONDS`."""
    ender = threading.Timer(_LAST_SECONDS, os._exit, (exit_code,))
    ender.daemon = True
    with suppress(RuntimeError):  # the system has no threads left
        ender.start()
    try:
        yield
    finally:
        ender.cancel()


def _heartbeat(pod: PodFolder | None, local_rank: int) -> Heartbeat:
    if pod is not None:
        try:
            return Heartbeat(HeartbeatFile(pod.heartbeat(local_rank), os.getpid(), int(os.environ.get("RANK", "0"))))
        except OSError as error:
            log.warning("rank_without_heartbeat", error=str(error))
    return Heartbeat()


def _log_failure(config: PhaseConfig, error: BaseException) -> None:
    if isinstance(error, InvalidJobError):
        log.error("invalid_job", phase=config.phase, error=str(error))
    else:
        log.error("phase_failed", phase=config.phase, exc_info=error)


def _failure_message(config: PhaseConfig, error: BaseException) -> TerminationMessage:
    if isinstance(error, InvalidJobError):
        return termination_message("InvalidJob", config, str(error))
    if (lack := lack_of_memory(error)) is not None:
        return termination_message("OutOfMemory", config, rank_sentence(lack, memory_use(), config))
    suspect = error.suspect if isinstance(error, TrainingError) else None
    text = f"{timeout_sentence(error)}{type(error).__name__}: {error}"
    return termination_message("Failed", config, text, suspect, peer_lost=has_lost_a_peer(error))


def _train(
    config: PhaseConfig, config_file: Path, stop: threading.Event, heartbeat: Heartbeat, pod: PodFolder | None
) -> TerminationMessage:
    heartbeat.working("reads the corpus")
    # Read the corpus first: a job without text then fails at once, before another rank can wait for this rank in a
    # collective.
    corpus = open_corpus(config)
    if config.preflight.mode != "None":
        heartbeat.working("checks ranks and networks")
        run_preflight(config, config_file)
    heartbeat.working("imports torch")
    from pseudoreal_trainer.engine.ranks.ranks import open_ranks
    from pseudoreal_trainer.training.phase import train_phase

    seconds = config.collective_seconds
    limit = None if seconds is None else timedelta(seconds=seconds)
    with open_ranks(heartbeat, gpus=config.gpus, limit=limit) as ranks:
        return train_phase(config, corpus, ranks, stop.is_set, pod)


if __name__ == "__main__":
    main()
