"""What the operator measures of its own work.

No counter has a job's name as a label: jobs come and go, and a series stays for as long as the process runs.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

# Each counter and histogram would have another series, with the time at which it began.
disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

NO_ANSWER = "none"
"""Code of a request that nobody answered."""

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
REPORTS = Counter(
    "pseudoreal_reports", "Reports of training pods, by the HTTP status of the answer.", ["status"], registry=REGISTRY
)
LAST_EVENT = Gauge(
    "pseudoreal_watch_last_event_timestamp_seconds",
    "Time at which a watch was last told something, in seconds since 1970. Those of Job and Pod are told something once"
    " a minute; that of PseudoRealJob only when a job changes. namespace is empty where one watch is for all.",
    ["kind", "namespace"],
    registry=REGISTRY,
)
LEADER = Gauge("pseudoreal_leader", "1 while this operator leads; 0 while it stands by.", registry=REGISTRY)
LEASE_AGE = Gauge(
    "pseudoreal_lease_renewal_age_seconds",
    "Seconds since the Lease was last renewed; 0 where this operator does not hold it.",
    registry=REGISTRY,
)
