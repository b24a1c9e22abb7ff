"""Main process of a trainer or delink pod: `python -m pseudoreal_trainer.cli.pod CONFIG.json`.

Starts torchrun, and reports to Kubernetes how the phase ended: by the termination message and the contract's exit
codes. torchrun's own exit code carries no such information. The process starts immediately, because it does not import
torch.
"""

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig, read_config
from pseudoreal_api.wire.contract import ContractError
from pseudoreal_api.wire.messages import Outcome, TerminationMessage

from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.cli.auto_layout import resolve_layout
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.runtime.history import ranks_of, record_end
from pseudoreal_trainer.runtime.in_place import run_in_place
from pseudoreal_trainer.runtime.metrics import metrics_port, serving_metrics
from pseudoreal_trainer.runtime.pod_folder import PodFolder, memory_directory
from pseudoreal_trainer.runtime.ranks import Launch
from pseudoreal_trainer.runtime.rendezvous.identity import check_secret
from pseudoreal_trainer.runtime.reports import endpoint_of_pod, reporting
from pseudoreal_trainer.runtime.stop import Stop, Stopped
from pseudoreal_trainer.runtime.termination import OUTCOME_DIRECTORY, termination_message, write_termination

WORKER = "pseudoreal_trainer.cli.rank"
_NEWEST_SECONDS = 10.0
"""Time limit in seconds for the search for the phase's newest checkpoint, because the volume may hang."""

log = structlog.get_logger()


def main() -> None:
    stop = Stop()
    configure_logs()
    path = Path(sys.argv[1])
    message = _run(path, stop)
    write_termination(message)
    if message.message:
        log.info("ended", outcome=message.outcome, message=message.message)
    sys.exit(message.exit_code)


def _run(path: Path, stop: Stop) -> TerminationMessage:
    try:
        config = read_config(path)
    except ContractError as error:
        return _report_unreadable(path, error)
    return _train(config, path, stop) if isinstance(config, PhaseConfig) else _delink(config)


def _report_unreadable(path: Path, error: ContractError) -> TerminationMessage:
    """Return the message of a pod that cannot read its configuration.

    Takes `phase` and `execution` from the raw JSON: these fields have the same form in every release.
    """
    config = json.loads(path.read_bytes())
    return TerminationMessage(
        outcome="InvalidJob",
        phase=config.get("phase", ""),
        execution=config.get("execution", 0),
        message=str(error)[:2000],
    )


def _delink(config: DelinkConfig) -> TerminationMessage:
    try:
        message = delink(config)
    except Exception as error:
        log.exception("delink_failed", phase=config.phase)
        message = termination_message("Failed", config, f"{type(error).__name__}: {error}")
    write_termination(message)
    record_end(config, message)
    return message


def _train(config: PhaseConfig, path: Path, stop: Stop) -> TerminationMessage:
    with _outcome_folder() as folder:
        pod = PodFolder(folder)
        with reporting(pod, endpoint_of_pod()), serving_metrics(pod, metrics_port(os.environ)):
            message = _run_with_layout(config, path, pod, stop)
        ranks = ranks_of(pod)
    message = message if message.checkpoint else _with_checkpoint_in_time(message, config)
    write_termination(message)
    record_end(config, message, ranks)
    return message


def _run_with_layout(config: PhaseConfig, path: Path, pod: PodFolder, stop: Stop) -> TerminationMessage:
    """Resolve the phase's layout, then run the ranks with it: the ranks and their supervisor see only the resolved
    config.

    Calls `check_secret` first: a pod that cannot join the rendezvous then ends before the search for a layout.
    """
    try:
        check_secret()
        config, layout = resolve_layout(config, stop.ending_at_once)
    except Stopped:
        return termination_message(
            "Yielded", config, "asked to stop while it searched a layout; nothing was to be saved"
        )
    except (InvalidJobError, TrainingError) as error:
        outcome: Outcome = "InvalidJob" if isinstance(error, InvalidJobError) else "Failed"
        return termination_message(outcome, config, str(error))
    if layout is not None:
        pod.write_layout(layout)
        path = pod.path / "configuration"  # no .json suffix: *.json files are outcomes of ranks
        path.write_text(config.to_json(indent=2), encoding="utf-8")
    message = run_in_place(Launch(config, path, WORKER, pod, stop))
    return message.model_copy(update={"layout": layout})


@contextmanager
def _outcome_folder() -> Iterator[Path]:
    """Yield the folder for the ranks' outcomes."""
    if named := os.environ.get(OUTCOME_DIRECTORY):
        Path(named).mkdir(parents=True, exist_ok=True)
        yield Path(named)
        return
    # Cleanup errors are ignored: the reporting thread may use the folder until the end.
    with tempfile.TemporaryDirectory("-pseudoreal", dir=memory_directory(), ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _with_checkpoint_in_time(message: TerminationMessage, config: PhaseConfig) -> TerminationMessage:
    """Return the message, completed with the newest checkpoint if the volume answers within `_NEWEST_SECONDS`.

    Call if the message names no checkpoint. The bare message is written first, because the volume may hang.
    """
    write_termination(message)
    found: list[TerminationMessage] = []
    asked = threading.Thread(target=lambda: found.append(_with_newest_checkpoint(message, config)), daemon=True)
    asked.start()
    asked.join(_NEWEST_SECONDS)
    return found[0] if found else message


def _with_newest_checkpoint(message: TerminationMessage, config: PhaseConfig) -> TerminationMessage:
    """Return the message, completed from the newest checkpoint of the phase; unchanged if the phase has no readable
    checkpoint."""
    store = store_of(config)
    try:
        newest = store.committed(config.phase)[-1:]
    except TrainingError:
        return message
    for manifest in newest:
        where = {"step": manifest.step, "tokens": manifest.tokens}
        return message.model_copy(
            update=where | {"loss": manifest.loss, "checkpoint": manifest.name, "digest": store.digest(manifest)}
        )
    return message


if __name__ == "__main__":
    main()
