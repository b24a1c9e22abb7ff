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
    "Duration of a reconcile pass over a job, in seconds.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
PASS_ERRORS = Counter(
    "pseudoreal_reconcile_errors",
    "Reconcile passes that failed and are retried. code: HTTP status with which the API server refused; none: it"
    " did not answer; internal: a bug of the operator.",
    ["code"],
    registry=REGISTRY,
)
PLAN_OVERRUNS = Counter(
    "pseudoreal_plan_overruns",
    (
        "Plans of a reconcile pass that took too long and were stopped; the operator then leaves the job alone"
        " for a while. The log names each (plan_overran)."
    ),
    registry=REGISTRY,
)
WAITING_JOBS = Gauge("pseudoreal_queue_depth", "Number of jobs that wait for a reconcile pass.", registry=REGISTRY)
API_REQUESTS = Counter(
    "pseudoreal_api_requests",
    (
        "Requests to the API server, without kopf's watch of the jobs. verb: method; code: HTTP status, or none"
        " if there was no answer."
    ),
    ["verb", "code"],
    registry=REGISTRY,
)
API_SECONDS = Histogram(
    "pseudoreal_api_request_duration_seconds",
    "Time from a request to the API server to the start of its answer, in seconds. verb: method.",
    ["verb"],
    buckets=(0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20),
    registry=REGISTRY,
)
OBJECTS_SKIPPED = Counter(
    "pseudoreal_objects_skipped",
    "Objects that were not read because they exceed a limit, by kind and reason: TooLarge (bytes), TooManyValues,"
    " TooDeep, NoJson. The log names each (object_skipped).",
    ["kind", "reason"],
    registry=REGISTRY,
)
OVERLONG_LINES = Counter(
    "pseudoreal_watch_overlong_lines",
    "Lines of watches that were skipped because they were longer than the limit for an object.",
    ["kind"],
    registry=REGISTRY,
)
WATCH_ERRORS = Counter(
    "pseudoreal_watch_errors",
    "Watches that ended with an error and were started again.",
    ["kind"],
    registry=REGISTRY,
)
KOPF_RESTARTS = Counter(
    "pseudoreal_kopf_restarts",
    "Number of times that kopf, which watches the jobs, ended and was started again.",
    registry=REGISTRY,
)
DEAD_TASKS = Gauge(
    "pseudoreal_dead_tasks",
    (
        "Number of tasks of the operator that have ended although they should run. Above 0, the liveness probe"
        " fails, and the kubelet restarts the operator."
    ),
    registry=REGISTRY,
)
DEAD_TASKS.set_function(lambda: len(dead_tasks()))
WORKER_ERRORS = Counter(
    "pseudoreal_worker_errors",
    "Bugs of the operator after which a worker of its queues continued. The log has each (worker_failed).",
    registry=REGISTRY,
)
REPORTS = Counter(
    "pseudoreal_reports",
    ("Reports received from training pods. status: HTTP status of the operator's answer."),
    ["status"],
    registry=REGISTRY,
)
REPORTING_JOBS = Gauge(
    "pseudoreal_reporting_jobs",
    (
        "Number of jobs that train and whose pods have reported. heard: whether a report of the job arrived"
        " within the last 20 seconds."
    ),
    ["heard"],
    registry=REGISTRY,
)
PATH_CUT = Gauge(
    "pseudoreal_reports_cut",
    (
        "1 while no reports of most jobs arrive, in most namespaces. The operator then does not take missing"
        " reports for a hang."
    ),
    registry=REGISTRY,
)
CONNECTIONS = Gauge(
    "pseudoreal_report_connections",
    "Open connections to the endpoint for reports. known: whether the connection has sent the valid token of a pod.",
    ["known"],
    registry=REGISTRY,
)
REFUSED_CONNECTIONS = Counter(
    "pseudoreal_report_connections_refused",
    "Connections to the endpoint for reports that were refused because their address had too many.",
    registry=REGISTRY,
)
HANDSHAKES_FAILED = Counter(
    "pseudoreal_report_handshakes_failed",
    "Failed TLS handshakes at the endpoint for reports. reason: untrusted (the client does not trust the"
    " certificate's authority), silent (the client did not continue), or other.",
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
    "Time of the last message of a watch, in seconds since 1970; a message comes at least once a minute. namespace"
    " is empty if one watch covers all namespaces.",
    ["kind", "namespace"],
    registry=REGISTRY,
)
LEADER = Gauge("pseudoreal_leader", "1 if this operator is the leader; 0 if it is on standby.", registry=REGISTRY)
LEASE_AGE = Gauge(
    "pseudoreal_lease_renewal_age_seconds",
    "Seconds since this operator last renewed the Lease; 0 if it does not hold the Lease.",
    registry=REGISTRY,
)

_COUNTER_HELP = {
    "refused_statuses": "Statuses that the API server accepted only without their texts or numbers.",
    "internal_errors": "Reconcile passes that a bug of the operator ended.",
    "lost_events": "Events that could not be posted and were dropped.",
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
