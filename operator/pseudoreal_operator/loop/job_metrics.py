"""Metrics of all jobs that the operator knows, collected from the watch of jobs.

Events before the operator's start are not counted again: for a job that has a status when it is first seen, counting
starts with the version first seen.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.loop.job_sample import JobSample, delink_seconds, hangs, phase_seconds, restarts, sample_of

Json = dict[str, Any]

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_PHASE_SECONDS = (10 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 3 * _DAY, 7 * _DAY, 14 * _DAY, 30 * _DAY, 90 * _DAY)
_DELINK_SECONDS = (10, 30, _MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 30 * _MINUTE, _HOUR, 6 * _HOUR)


def _now() -> datetime:
    return datetime.now(UTC)


class JobMetrics(Collector):
    """Prometheus collector of job metrics: counts the events between successive versions of each job, and reports
    gauges of the jobs that exist."""

    def __init__(self, registry: CollectorRegistry, now: Callable[[], datetime] = _now) -> None:
        self._now = now
        self._samples: dict[str, JobSample] = {}
        self._is_paused = False
        registry.register(self)

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"pseudoreal_{name}", meaning, ["namespace", *labels], registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pseudoreal_{name}_duration_seconds", meaning, buckets=buckets, registry=registry)

        self._created = counter("jobs_created", "Jobs that were first seen without a status.")
        self._completed = counter("jobs_completed", "Jobs that have completed.")
        self._failed = counter("jobs_failed", "Jobs that have failed, by the reason of the condition Failed.", "reason")
        counts = "counted: whether the restart counts against spec.restart.maxRestarts."
        self._restarts = counter("restarts", f"Restarts of executions. {counts}", "reason", "counted")
        self._hangs = counter("hangs", "Executions that stood still for longer than spec.hang allows.", "reason")
        self._phases = histogram("phase", "Time from the beginning of a phase to its end.", _PHASE_SECONDS)
        delink = "Time from the end of a phase to the checkpoint that the next one begins with."
        self._delinks = histogram("delink", delink, _DELINK_SECONDS)

    def pause(self) -> None:
        """Stop counting while another operator counts, and only keep the newest version of each job."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        for sample in self._samples.values():
            self._count_first(sample)

    def job_changed(self, change: str | None, body: Json) -> None:
        """Process a change of a job. `change`: the event type; None: the job was read from a list."""
        uid = body["metadata"]["uid"]
        if change == "DELETED":
            self._samples.pop(uid, None)
            return
        try:
            after = sample_of(body)
        except ValueError:
            return  # the pass over the job reports it
        before, self._samples[uid] = self._samples.get(uid), after
        if self._is_paused:
            return
        if before is None:
            self._count_first(after)
        else:
            self._count(before, after)

    def forget(self, name: Name) -> None:
        """Forget a deleted job, even if no watch event reported its deletion."""
        gone = [uid for uid, sample in self._samples.items() if (sample.namespace, sample.name) == name]
        for uid in gone:
            del self._samples[uid]

    def _count_first(self, sample: JobSample) -> None:
        # Create the counter with value 0, so that the first completed job is an increase.
        self._completed.labels(sample.namespace)
        self._created.labels(sample.namespace).inc(not sample.has_status)

    def _count(self, before: JobSample, after: JobSample) -> None:
        namespace = after.namespace
        if after.complete and not before.complete:
            self._completed.labels(namespace).inc()
        if after.failed and not before.failed:
            self._failed.labels(namespace, after.failed).inc()
        for reason, counts in restarts(before, after):
            self._restarts.labels(namespace, reason, str(counts).lower()).inc()
        for reason in hangs(before, after):
            self._hangs.labels(namespace, reason).inc()
        for seconds in phase_seconds(before, after):
            self._phases.observe(seconds)
        if (delink := delink_seconds(before, after, self._now())) is not None:
            self._delinks.observe(delink)

    def collect(self) -> Iterator[Metric]:
        samples = [] if self._is_paused else [*self._samples.values()]
        yield _gauge_by_reason(
            "pseudoreal_jobs", "Jobs by status.state.", "state", Tally((one.namespace, one.state) for one in samples)
        )
        yield _gauge_by_reason(
            "pseudoreal_jobs_standing",
            "Jobs that have not ended and do not go on, by the reason of the condition Progressing.",
            "reason",
            Tally((one.namespace, one.not_progressing) for one in samples if one.not_progressing),
        )
        yield self._checkpoint_ages(samples)

    def _checkpoint_ages(self, samples: Iterable[JobSample]) -> Metric:
        ages = GaugeMetricFamily(
            "pseudoreal_checkpoint_age_seconds",
            "Seconds of training that would be lost with the pods of a job: since its newest checkpoint, or since the"
            " execution began if that is later. Only of jobs that train.",
            labels=["namespace", "job_name"],
        )
        now = self._now()
        for sample in samples:
            if sample.unsaved_since is not None:
                age = max(0.0, (now - sample.unsaved_since).total_seconds())
                ages.add_metric([sample.namespace, sample.name], age)
        return ages


def _gauge_by_reason(name: str, meaning: str, label: str, tally: "Tally[tuple[str, str]]") -> Metric:
    gauge = GaugeMetricFamily(name, meaning, labels=["namespace", label])
    for (namespace, value), count in tally.items():
        gauge.add_metric([namespace, value], count)
    return gauge
