"""Metrics of the operator's own work.

No counter has a job's name as a label: jobs come and go, but a series stays for as long as the process runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pseudoreal_operator.tasks import dead_tasks

# Otherwise each counter and histogram would have another series, with its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

NO_ANSWER = "none"
"""Metric label in place of the HTTP status, for a request that got no answer."""

PASS_SECONDS = Histogram(
    "pseudoreal_reconcile_duration_seconds",
    "Duration of a pass over a job.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
PASS_ERRORS = Counter(
    "pseudoreal_reconcile_errors",
    "Passes that failed and are tried again, by the HTTP status of the API server's refusal; none: it did not answer;"
    " internal: a mistake of the operator.",
    ["code"],
    registry=REGISTRY,
)
PLAN_OVERRUNS = Counter(
    "pseudoreal_plan_overruns",
    "Plans that took too long, and were ended; the job is left alone. The log names each (plan_overran).",
    registry=REGISTRY,
)
WAITING_JOBS = Gauge("pseudoreal_queue_depth", "Jobs that wait for a pass.", registry=REGISTRY)
API_REQUESTS = Counter(
    "pseudoreal_api_requests",
    "Requests to the API server, by method and HTTP status (none: no answer), without kopf's watch of the jobs.",
    ["verb", "code"],
    registry=REGISTRY,
)
API_SECONDS = Histogram(
    "pseudoreal_api_request_duration_seconds",
    "Time from a request to the API server to the beginning of its answer, by method.",
    ["verb"],
    buckets=(0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20),
    registry=REGISTRY,
)
OBJECTS_SKIPPED = Counter(
    "pseudoreal_objects_skipped",
    "Times that an object was not read, as it is beyond a bound, by kind and reason: TooLarge (bytes), TooManyValues,"
    " TooDeep, NoJson. The log names each (object_skipped).",
    ["kind", "reason"],
    registry=REGISTRY,
)
OVERLONG_LINES = Counter(
    "pseudoreal_watch_overlong_lines",
    "Lines of watches that were longer than an object may be, and were passed over.",
    ["kind"],
    registry=REGISTRY,
)
WATCH_ERRORS = Counter(
    "pseudoreal_watch_errors",
    "Times that a watch ended with an error, and was begun again.",
    ["kind"],
    registry=REGISTRY,
)
KOPF_RESTARTS = Counter(
    "pseudoreal_kopf_restarts",
    "Times that kopf, which watches the jobs, ended and was started again.",
    registry=REGISTRY,
)
DEAD_TASKS = Gauge(
    "pseudoreal_dead_tasks",
    "Tasks that should run and have ended: the liveness probe fails, and the kubelet starts the operator again.",
    registry=REGISTRY,
)
DEAD_TASKS.set_function(lambda: len(dead_tasks()))
WORKER_ERRORS = Counter(
    "pseudoreal_worker_errors",
    "Mistakes of the operator that a worker of a queue has outlived. The log has each (worker_failed).",
    registry=REGISTRY,
)
REPORTS = Counter(
    "pseudoreal_reports", "Reports of training pods, by the HTTP status of the answer.", ["status"], registry=REGISTRY
)
REPORTING_JOBS = Gauge(
    "pseudoreal_reporting_jobs",
    "Jobs whose pods train and have reported. heard: whether any of their pods was heard within the last 20 seconds.",
    ["heard"],
    registry=REGISTRY,
)
PATH_CUT = Gauge(
    "pseudoreal_reports_cut",
    "1 while the reports of most jobs do not arrive, in most namespaces; nobody is judged by silence then.",
    registry=REGISTRY,
)
CONNECTIONS = Gauge(
    "pseudoreal_report_connections",
    "Connections to the endpoint for reports. known: whether they have brought the good token of a pod.",
    ["known"],
    registry=REGISTRY,
)
REFUSED_CONNECTIONS = Counter(
    "pseudoreal_report_connections_refused",
    "Connections that were closed at once, as their address opened too many.",
    registry=REGISTRY,
)
HANDSHAKES_FAILED = Counter(
    "pseudoreal_report_handshakes_failed",
    "TLS handshakes that failed. untrusted: the client does not accept the certificate, as it trusts another authority;"
    " silent: it did not go on; other.",
    ["reason"],
    registry=REGISTRY,
)
CERTIFICATE_EXPIRES = Gauge(
    "pseudoreal_report_certificate_expiration_timestamp_seconds",
    "Time at which the certificate of the endpoint for reports expires, in seconds since 1970.",
    registry=REGISTRY,
)
LAST_EVENT = Gauge(
    "pseudoreal_watch_last_event_timestamp_seconds",
    "Time at which a watch was last told something, in seconds since 1970; it is told something once a minute."
    " namespace is empty where one watch is for all.",
    ["kind", "namespace"],
    registry=REGISTRY,
)
LEADER = Gauge("pseudoreal_leader", "1 while this operator leads; 0 while it stands by.", registry=REGISTRY)
LEASE_AGE = Gauge(
    "pseudoreal_lease_renewal_age_seconds",
    "Seconds since the Lease was last renewed; 0 where this operator does not hold it.",
    registry=REGISTRY,
)

_COUNTER_HELP = {
    "refused_statuses": "Statuses that the API server took only without their texts, or without figures.",
    "internal_errors": "Passes that ended by a mistake of the operator.",
    "lost_events": "Events that were given up.",
}


@dataclass(eq=False)
class OperatorCounters(Collector):
    refused_statuses: int = 0
    """Number of statuses that the API server accepted only without their texts, or without figures."""
    internal_errors: int = 0
    """Number of passes that ended by a bug of the operator."""
    lost_events: int = 0
    """Number of events that were dropped without having been posted."""

    def collect(self) -> Iterator[Metric]:
        for name, meaning in _COUNTER_HELP.items():
            yield CounterMetricFamily(f"pseudoreal_{name}", meaning, value=getattr(self, name))
