"""`/metrics` of a pod in the Prometheus text format, served by a thread of the supervisor process.

Scrapes do not disturb the ranks. Job, phase and execution are labels of the pod, added by the scraper.
"""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from pseudoreal_api.wire.reports import METRICS_PORT, PodReport

from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.reports import pod_report

PATH = "/metrics"
_CLIENT_SECONDS = 2.0
"""Time limit in seconds of each socket operation with a client. A silent client delays the next client by this time."""
_LAST_SECONDS = 1.0
"""Maximum number of seconds for which the pod's shutdown waits for a client."""
_POLL_SECONDS = 0.1
_PREFIX = "pseudoreal_trainer_"
_PROGRESS = {
    "step": "Number of training steps done since the job's start.",
    "total_steps": "Step at which the last phase ends at the latest.",
    "tokens": "Number of tokens trained since the job's start.",
    "loss": "Training loss of the newest step, in nats per token.",
    "validation_loss": "Newest validation loss, in nats per token.",
    "learning_rate": "Learning rate of the newest step.",
    "gradient_norm": "L2 norm of the whole gradient of the newest step, before clipping.",
    "tokens_per_second": "Tokens trained per second, mean over the newest 20 steps.",
    "step_seconds": "Seconds of a step, mean over the newest 20 steps.",
    "remaining_seconds": "Estimate of the seconds that remain for the current phase.",
    "skipped_steps": "Number of steps since the job's start that skipped updates.",
    "teraflops_per_second": "Rate of each rank, in 10^12 operations of the model per second.",
    "mfu": "Rate of each rank (teraflops_per_second) as a share of the device's peak in bfloat16.",
    "device_bytes": "Peak of the memory that rank 0 has used on its GPU, in bytes.",
    "host_bytes": "Peak of the memory that rank 0 has used on the host, in bytes.",
}
"""Field of a progress report -> HELP text of its gauge. A field with value None has no sample."""

log = structlog.get_logger()


def metrics_port(environment: Mapping[str, str]) -> int | None:
    """Return the port named by the environment; None if metrics are off."""
    text = environment.get(METRICS_PORT)
    return int(text) if text else None


@contextmanager
def serving_metrics(folder: PodFolder, port: int | None) -> Iterator[int | None]:
    """Serve /metrics inside the context; yield the port, or None if metrics are off or the port is taken.

    Port 0 asks for a free port. If the port is taken, log a warning and serve no metrics: the training continues.
    """
    if port is None:
        yield None
        return
    try:
        server = _Server(folder, port)
    except OSError as error:
        log.warning("metrics_not_served", port=port, error=str(error))
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        # shutdown() waits for the current client, without a limit; the pod waits `_LAST_SECONDS` at most.
        threading.Thread(target=server.shutdown, daemon=True).start()
        thread.join(_LAST_SECONDS)
        server.server_close()


class _Server(TCPServer):
    """HTTP server for IPv6 and IPv4 if the machine supports both, else for IPv4. Handles one client at a time.

    The server of prometheus_client has a thread for each connection and no time limit, so silent clients would
    accumulate threads in the supervisor process.
    """

    allow_reuse_address = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, folder: PodFolder, port: int) -> None:
        self.folder = folder
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, *_: object) -> None:
        """Ignore aborted connections."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404)
            return
        body = exposition(pod_report(self.server.folder))
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a line for each request would be noise."""


def exposition(report: PodReport) -> bytes:
    """Return the report in the Prometheus text format 0.0.4. Pure."""
    return generate_latest(_PodMetrics(report))


class _PodMetrics(Collector):
    """Metric families of one report, without empty families: only the pod of rank 0 has a progress report."""

    def __init__(self, report: PodReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        families = (*self._progress(), *self._checkpoint(), *self._ranks())
        return (family for family in families if family.samples)

    def _progress(self) -> Iterator[Metric]:
        progress = self._report.progress
        if progress is None:
            return
        for name, meaning in _PROGRESS.items():
            yield _gauge(name, meaning, {"": getattr(progress, name)})
        meaning = "Seconds of all steps since the start of the process, without validations and checkpoints."
        yield CounterMetricFamily(f"{_PREFIX}steps_seconds", meaning, progress.seconds)
        meaning = (
            "The part of steps_seconds_total in which rank 0 waited. for: data (samples), reductions (sums of gradients"
            " over ranks) or updates (of units in their home)."
        )
        waits = CounterMetricFamily(f"{_PREFIX}wait_seconds", meaning, labels=["for"])
        for cause, seconds in progress.waits.items():
            waits.add_metric([cause], seconds)
        yield waits

    def _checkpoint(self) -> Iterator[Metric]:
        saved = self._report.checkpoint
        if saved is not None:
            meaning = "Seconds since the newest checkpoint of this execution was committed."
            yield _gauge("checkpoint_age_seconds", meaning, {"": saved.seconds})
            yield _gauge("checkpoint_step", "Step of the newest checkpoint of this execution.", {"": saved.step})

    def _ranks(self) -> Iterator[Metric]:
        ranks = {str(rank.rank): rank for rank in self._report.ranks}
        meaning = "Number of training steps that the rank has done since the job's start."
        yield _gauge("rank_step", meaning, {name: rank.step for name, rank in ranks.items()}, "rank")
        meaning = "Seconds of a step of the rank without waits for other ranks, mean over the newest steps."
        yield _gauge("rank_busy_seconds", meaning, {name: rank.busy_seconds for name, rank in ranks.items()}, "rank")
        meaning = "Seconds since the present activity of the rank began. They grow while the rank makes no progress."
        yield _gauge("rank_activity_seconds", meaning, {name: rank.seconds for name, rank in ranks.items()}, "rank")


def _gauge(name: str, meaning: str, values: Mapping[str, float | None], label: str | None = None) -> Metric:
    """Return a gauge with a sample for each known value. The keys of `values` are values of `label`; "" without a
    label."""
    gauge = GaugeMetricFamily(_PREFIX + name, meaning, labels=[label] if label else [])
    for labelled, value in values.items():
        if value is not None:
            gauge.add_metric([labelled] if label else [], value)
    return gauge
