"""One rank of a phase: `python -m pseudoreal_trainer.worker CONFIG.json`, under torchrun or alone.

Its exit code is that of the contract. A rank that yields must not end with 0: torchrun would then wait for minutes for
the torchruns of the other pods, which may be gone.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import structlog
from pseudoreal_api.messages import TerminationMessage
from pseudoreal_api.resolved import PhaseConfig

from pseudoreal_trainer.corpus import load_corpus
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.outcome import OUTCOME_DIRECTORY, ended_badly, leave_outcome
from pseudoreal_trainer.preflight.start import run_preflight

log = structlog.get_logger()


def main() -> None:
    stop = threading.Event()
    # Before torch is imported, which takes seconds in which a SIGTERM would otherwise kill the process.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    configure_logs()
    config = PhaseConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
    message = _outcome(config, stop)
    if OUTCOME_DIRECTORY in os.environ:
        leave_outcome(Path(os.environ[OUTCOME_DIRECTORY]), int(os.environ.get("LOCAL_RANK", "0")), message)
    sys.exit(message.exit_code)


def _outcome(config: PhaseConfig, stop: threading.Event) -> TerminationMessage:
    try:
        return _train(config, stop)
    except InvalidJobError as error:
        log.error("invalid_job", phase=config.phase, error=str(error))
        return ended_badly("InvalidJob", config, str(error))
    except Exception as error:
        log.exception("phase_failed", phase=config.phase)
        suspect = error.suspect if isinstance(error, TrainingError) else None
        return ended_badly("Failed", config, f"{type(error).__name__}: {error}", suspect)


def _train(config: PhaseConfig, stop: threading.Event) -> TerminationMessage:
    # The corpus comes first: a job without text fails at once, and no rank waits for one that has failed.
    corpus = load_corpus(config.data, config.model.sequence)
    if config.preflight:
        run_preflight(config, Path(sys.argv[1]))
    from pseudoreal_trainer.phase import train_phase
    from pseudoreal_trainer.ranks import open_ranks

    with open_ranks() as ranks:
        return train_phase(config, corpus, ranks, stop.is_set)


if __name__ == "__main__":
    main()
