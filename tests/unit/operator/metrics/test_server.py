"""The operator's metrics over HTTP, as Prometheus reads them."""

import re

from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families
from pseudoreal_operator.loop.job_metrics import JobMetrics
from pseudoreal_operator.metrics.registry import REGISTRY, OperatorCounters
from pseudoreal_operator.metrics.server import PATH, serve_metrics


async def test_metrics_are_served_in_prometheus_formats() -> None:
    registry = CollectorRegistry()
    counters = OperatorCounters(lost_events=2)
    registry.register(counters)
    Gauge("height", "How high.", ["of"], registry=registry).labels('a "quoted"\nname').set(3)
    async with serve_metrics(registry, port=0) as port, ClientSession() as session:
        answer = await session.get(f"http://127.0.0.1:{port}{PATH}")
        assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
        (sample,) = families["height"].samples
        assert (sample.labels, sample.value) == ({"of": 'a "quoted"\nname'}, 3)
        (lost,) = families["pseudoreal_lost_events"].samples
        assert (lost.name, lost.value) == ("pseudoreal_lost_events_total", 2)
        assert (await session.get(f"http://127.0.0.1:{port}/")).status == 404
        openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = await session.get(f"http://127.0.0.1:{port}{PATH}", headers=openmetrics)
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await answer.text()).endswith("# EOF\n")


def test_metric_names_and_units_follow_prometheus_conventions() -> None:
    """https://prometheus.io/docs/practices/naming: one prefix, base units, counters end in total."""
    registry = CollectorRegistry()
    JobMetrics(registry)
    registry.register(OperatorCounters())
    families = [*registry.collect(), *REGISTRY.collect()]
    own = [family for family in families if not family.name.startswith("process_")]
    assert len(own) > 15
    for family in own:
        assert re.fullmatch("pseudoreal_[a-z_]+", family.name)
        assert not re.search("_(ms|minutes|total|milli|count)$", family.name)
        assert family.documentation.endswith(".")


def test_counters_have_no_job_name_label() -> None:
    registry = CollectorRegistry()
    JobMetrics(registry)
    for metric in (*registry._collector_to_names, *REGISTRY._collector_to_names):
        labels = getattr(metric, "_labelnames", ())
        assert set(labels) <= {"namespace", "reason", "counted", "verb", "code", "status", "kind", "heard", "known"}
