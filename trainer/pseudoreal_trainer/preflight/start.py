"""Runs the preflight check of a rank, and fails the rank if any rank is broken and the job demands a failure."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.reports import NODE_NAME

from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.preflight.diagnosis import Diagnosis, sentence_of

COMMAND = (sys.executable, "-m", "pseudoreal_trainer.preflight")

_SECONDS = 1200.0
"""Seconds after which a check that hangs is killed; the check itself has shorter limits."""

log = structlog.get_logger()


def run_preflight(config: PhaseConfig, path: Path) -> None:
    """Run the check of this rank. Every rank calls this, with the path of its configuration file.

    If a rank is broken, or this rank's check has failed: with spec.network.preflight.mode Fail, raises TrainingError;
    with Warn, only logs a warning.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        diagnosis = _check(rank, path)
    except TrainingError as error:
        if config.preflight.mode == "Fail":
            raise
        log.warning("preflight_broken", ranks=[rank], message=str(error))
        return
    # With Warn, rank 0's check has already logged the broken ranks.
    if diagnosis.broken and config.preflight.mode == "Fail":
        raise TrainingError(
            sentence_of(diagnosis), suspect_elsewhere(diagnosis.suspect, rank, config.processes_per_worker)
        )


def _check(rank: int, config: Path) -> Diagnosis:
    """Return the diagnosis on all ranks. Raises TrainingError if this rank's check ends without one."""
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        file = Path(folder) / "diagnosis.json"
        ending = _run(config, file)
        if not file.exists():
            node = os.environ.get(NODE_NAME) or socket.gethostname()
            raise TrainingError(f"the check of rank {rank} on node {node} before the first step {ending}")
        return Diagnosis.model_validate_json(file.read_bytes())


def _run(config: Path, diagnosis: Path) -> str:
    """Run the check's process; return a phrase about the end of the process, for a check without a diagnosis."""
    # A new session: a signal to the rank's process group must not reach the check. The check ends soon anyway.
    process = subprocess.Popen([*COMMAND, config, diagnosis], start_new_session=True)
    try:
        code = process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"did not end within {_SECONDS:.0f} s"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"ended with {how} and without a verdict"


def suspect_elsewhere(suspect: int | None, rank: int, processes: int) -> int | None:
    """Return the suspect rank; None if the suspect is in this pod, or unknown."""
    if suspect is None or suspect // processes == rank // processes:
        return None
    return suspect
