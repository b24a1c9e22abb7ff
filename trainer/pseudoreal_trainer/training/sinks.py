"""Sinks: metrics services that get each step's figures, in addition to metrics.jsonl.

Each sink runs in a daemon thread of its own: a slow or failed service neither delays a step nor fails the training. At
the end of a phase, all sinks together get `CLOSE_SECONDS`.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from typing import Any, Protocol

import structlog
from pseudoreal_api.resolved.config import JobIdentity, PhaseConfig
from pseudoreal_api.spec.logging import MLflow as MLflowSpec
from pseudoreal_api.spec.logging import Sink as SinkSpec
from pseudoreal_api.spec.logging import WeightsAndBiases as WeightsAndBiasesSpec
from pseudoreal_api.wire.messages import ProgressReport
from pydantic.alias_generators import to_camel

from pseudoreal_trainer.errors import InvalidJobError

Figures = Mapping[str, float]
Texts = Mapping[str, str]


class Sink(Protocol):
    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        """Log the figures and generated texts of a step. Steps come in ascending order."""

    def close(self) -> None:
        """Send pending entries, then close the log file or end the run in the service."""


def texts_of(line: ProgressReport) -> Texts:
    """Return name -> text for the generated samples of a line, prompts included; empty if the line has no samples."""
    return {f"samples/{n}": f"{each.prompt}{each.text}" for n, each in enumerate(line.samples or [])}


def figures_of(line: ProgressReport) -> Figures:
    """Return the figures of a line of metrics.jsonl, under the names shown in metrics services."""
    cost = line.checkpoint
    known = {
        "train/loss": line.loss,
        "train/gradient_norm": line.gradient_norm,
        "train/learning_rate": line.learning_rate,
        "train/tokens": line.tokens,
        "train/skipped_steps": line.skipped_steps,
        "experts/load_max": line.expert_load_max,
        "experts/load_mean": line.expert_load_mean,
        "experts/idle": line.idle_experts,
        "experts/dropped": line.dropped_tokens,
        "experts/router_entropy": line.router_entropy,
        "experts/auxiliary_loss": line.auxiliary_loss,
        "validation/loss": line.validation_loss,
        "speed/tokens_per_second": line.tokens_per_second,
        "speed/teraflops_per_second": line.teraflops_per_second,
        "speed/mfu": line.mfu,
        "speed/waited_seconds": line.waited_seconds,
        "speed/data_seconds": line.data_seconds,
        "memory/device_bytes": line.device_bytes,
        "memory/host_bytes": line.host_bytes,
        "checkpoint/seconds": None if cost is None else cost.seconds,
        "checkpoint/stall_seconds": None if cost is None else cost.stall_seconds,
    }
    known |= {f"validation/{name}": loss for name, loss in (line.validation_losses or {}).items()}
    known |= {f"validation/{name}_bits_per_byte": bits for name, bits in (line.bits_per_byte or {}).items()}
    return {name: float(figure) for name, figure in known.items() if figure is not None}


Parameters = dict[str, str | int | float | bool]
"""Name -> value of the job's configuration, as shown in metrics services."""
_JOB_FIELDS = ("model", "data", "optimizer", "precision")
_PHASE_FIELDS = (
    "sharing",
    "until",
    "workers",
    "processes_per_worker",
    "batch",
    "parallelism",
    "activations",
    "offload",
)
"""Fields of a phase's configuration that services get. Other fields name folders, storage, pods and services: of no use
to compare runs, and the place where a user may have put a password."""
_MOST_PARAMETERS = 500
_PARAMETER_CHARACTERS = 500
"""Maximum length of a value: MLflow's limit."""
_PARAMETERS_AT_ONCE = 100
"""Maximum number of parameters in a call: MLflow's limit."""


def parameters_of(config: PhaseConfig) -> Parameters:
    """Return the configuration that the job has in this phase: what all phases have in common, and the phase's own
    fields under phases.NAME. At most `_MOST_PARAMETERS` entries, texts of at most `_PARAMETER_CHARACTERS`."""
    known = config.model_dump(mode="json", by_alias=True, include={*_JOB_FIELDS, *_PHASE_FIELDS})
    known["data"] = {name: value for name, value in known["data"].items() if name not in ("path", "volume", "sources")}
    own = {to_camel(name): known.pop(to_camel(name)) for name in _PHASE_FIELDS}
    found = chain(_flat(known, ""), _flat(own, f"phases.{config.phase}."))
    return dict(islice(found, _MOST_PARAMETERS))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield dotted names and values; a list is a text. Nulls and URLs are left out: a URL may contain a password."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}{key}." if isinstance(item, dict) else f"{name}{key}")
    elif isinstance(value, bool | int | float):
        yield name, value
    elif value is not None:
        text = value if isinstance(value, str) else json.dumps(value)
        if "://" not in text:
            yield name, text[:_PARAMETER_CHARACTERS]


class TensorBoard:
    def __init__(self, work_directory: Path, execution: int, first_step: int) -> None:
        """`first_step`: first step to be logged. TensorBoard then hides the entries of earlier executions from this
        step on."""
        from tensorboardX import SummaryWriter

        # A file's name has the second of its creation; the suffix distinguishes executions created in the same second.
        self._writer = SummaryWriter(
            str(work_directory / "tensorboard"),
            purge_step=first_step,
            flush_secs=10,
            filename_suffix=f".{execution}",
        )

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, step)
        for name, text in texts.items():
            # TensorBoard renders Markdown, which shows indented text verbatim.
            self._writer.add_text(name, indent(text, "    ", lambda _: True), step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Weights & Biases run of the job, identified by the job's uid.

    The service accepts each step once. Training a step again after a fault gives the same figures, so nothing is lost.
    """

    def __init__(
        self, spec: WeightsAndBiasesSpec, job: JobIdentity, work_directory: Path, parameters: Parameters
    ) -> None:
        import wandb

        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=job.uid,
            name=job.name,
            mode="offline" if spec.mode == "Offline" else "online",
            dir=str(work_directory),
            resume="allow",
        )
        # A later phase or execution may have other values, for instance more workers.
        self._run.config.update(parameters, allow_val_change=True)  # type: ignore[no-untyped-call]

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        import wandb

        tables = {name: wandb.Table(columns=["text"], data=[[text]]) for name, text in texts.items()}
        self._run.log({**figures, **tables}, step=step)

    def close(self) -> None:
        self._run.finish()


_UID, _NAME = "pseudoreal_uid", "mlflow.runName"
_MARK = "train/tokens"
"""Name of a metric that is logged at every step; its history gives the newest logged step."""


class MLflow:
    """MLflow run of the job, found by the job's uid."""

    def __init__(self, spec: MLflowSpec, job: JobIdentity, parameters: Parameters) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=spec.url)
        experiment = self._experiment(spec.experiment)
        found = self._client.search_runs([experiment], f"tags.{_UID} = '{job.uid}'")
        run = found[0] if found else self._client.create_run(experiment, tags={_UID: job.uid, _NAME: job.name})
        self._run: str = run.info.run_id
        # a fault or the end of an earlier phase may have ended the run
        self._client.update_run(self._run, status="RUNNING")
        self._log_parameters(parameters)
        known = self._client.get_metric_history(self._run, _MARK)
        self._newest = max((metric.step for metric in known), default=0)
        """Newest step in the run. Steps up to this step are not logged again: training a step again after a fault gives
        the same figures."""

    def _log_parameters(self, parameters: Parameters) -> None:
        """Log the parameters missing from the run. Known ones keep their values: MLflow refuses to change them."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run).data.params
        missing = [Param(name, str(value)) for name, value in parameters.items() if name not in known]
        for first in range(0, len(missing), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run, params=missing[first : first + _PARAMETERS_AT_ONCE])

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        from mlflow.entities import Metric

        if step <= self._newest:
            return
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, figure, now, step) for name, figure in figures.items()])
        for name, text in texts.items():
            self._client.log_text(self._run, text, f"{name}/{step:08d}.txt")
        self._newest = step

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


_PACKAGES = {"TensorBoard": "tensorboardX", "WeightsAndBiases": "wandb", "MLflow": "mlflow"}
"""Type of a sink -> the Python package that it needs."""
CLOSE_SECONDS = 15.0
"""Time limit in seconds, for all sinks together, to send pending entries at the end of a phase: a terminating pod has
little time."""
_MOST_WAITING = 10_000
"""Maximum number of steps queued for a sink; further steps are dropped for this sink."""

log = structlog.get_logger()


class SinkThread:
    """Thread that feeds one sink from a queue."""

    def __init__(self, name: str, open_: Callable[[], Sink], most_waiting: int = _MOST_WAITING) -> None:
        """`open_` creates the sink. The sink's thread calls `open_`, because the call may wait for a service."""
        self._name, self._open, self._most = name, open_, most_waiting
        self._waiting: SimpleQueue[tuple[int, Figures, Texts] | None] = SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        """Queue the figures and texts without waiting. If the queue is full, drop the step for this sink."""
        if self._waiting.qsize() < self._most:
            self._waiting.put((step, figures, texts))
        else:
            self._left_out += 1

    def end(self) -> None:
        """Signal that no further step will be logged."""
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the sink is closed, at most until `deadline`, in seconds of time.monotonic. Call after `end`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        # One entry of the queue is the end marker put by `end`.
        left_out = self._left_out + max(0, self._waiting.qsize() - 1)
        if left_out:
            log.warning("sink_left_steps_out", sink=self._name, steps=left_out)

    def _run(self) -> None:
        try:
            sink = self._open()
            while (waiting := self._waiting.get()) is not None:
                sink.log(*waiting)
            sink.close()
        except Exception as error:  # of a third-party library or a service; metrics.jsonl has all figures
            log.warning("sink_given_up", sink=self._name, error=f"{type(error).__name__}: {error}")


def finish_sinks(sinks: Sequence[SinkThread]) -> None:
    """Close all sinks, after their pending entries; wait at most `CLOSE_SECONDS` for all of them together."""
    for sink in sinks:
        sink.end()
    deadline = time.monotonic() + CLOSE_SECONDS
    for sink in sinks:
        sink.join(deadline)


def check_packages(config: PhaseConfig) -> None:
    """Raise InvalidJobError if the package of a configured sink is not installed."""
    for spec in config.logging.sinks:
        package = _PACKAGES[spec.type]
        if find_spec(package) is None:
            raise InvalidJobError(
                f"spec.logging.sinks: {spec.type} needs the package {package}, which this image does not have; take"
                f" an image that has it (pip install {package}), or remove the sink"
            )


def open_sinks(config: PhaseConfig, first_step: int) -> list[SinkThread]:
    """Open the job's sinks. `first_step`: first step to be logged."""
    return [SinkThread(spec.type, _opener(spec, config, first_step)) for spec in config.logging.sinks]


def _opener(spec: SinkSpec, config: PhaseConfig, first_step: int) -> Callable[[], Sink]:
    work = Path(config.work_directory)
    if spec.weights_and_biases is not None:
        return partial(WeightsAndBiases, spec.weights_and_biases, config.job, work, parameters_of(config))
    if spec.mlflow is not None:
        return partial(MLflow, spec.mlflow, config.job, parameters_of(config))
    return partial(TensorBoard, work, config.execution, first_step)
