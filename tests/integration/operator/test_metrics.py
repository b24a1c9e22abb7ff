"""Metrics of a real operator and a pod in a real Prometheus, and the dashboard and alerts based on them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_trainer.runtime.heartbeat import Heartbeat, HeartbeatFile
from pseudoreal_trainer.runtime.metrics import serving_metrics
from pseudoreal_trainer.runtime.pod_folder import PodFolder

from tests.integration.operator.support.endpoint import Reporter, at, progress
from tests.support import prometheus
from tests.support.chart import CHART
from tests.support.cluster import Cluster, complete_stage
from tests.support.operator_process import Operator
from tests.support.patience import wait_for
from tests.support.prometheus import Prometheus, promtool

pytestmark = pytest.mark.integration

ALERTS = CHART / "files/alerts.yaml"
DASHBOARD = CHART / "files/dashboard.json"
TESTS = Path(__file__).parents[2] / "data" / "alerts.yaml"
EVERYTHING: dict[str, Any] = {"gradient_norm": 1.0, "mfu": 0.4, "device_bytes": 2**30, "host_bytes": 2**30}


def value(operator: Operator, name: str, **labels: str) -> float | None:
    return operator.metrics().get((f"pseudoreal_{name}", frozenset(labels.items())))


def live(cluster: Cluster) -> None:
    """Run three jobs: one trains, one completes all phases with a restart in between, and one fails."""
    training = cluster.create("training")
    (pod,) = training.run("training-pseudo-e1")
    Reporter.of(cluster, pod).tell(at(5))
    job = cluster.create("whole")
    (pod,) = job.run("whole-pseudo-e1")
    job.end(pod, "OutOfMemory", message="too large")
    complete_stage(job, "pseudo", execution=2)
    complete_stage(job, "delink", execution=2)
    complete_stage(job, "real", execution=2)
    bad = cluster.create("bad")
    (pod,) = bad.run("bad-pseudo-e1")
    bad.end(pod, "InvalidJob", message="no corpus")
    job.wait("the end", lambda status: status.state == "Complete")
    bad.wait("the end", lambda status: status.state == "Failed")
    training.wait("the training", lambda status: status.progress is not None)


def test_prometheus_scrapes_all_series_of_dashboard_and_alerts(
    cluster: Cluster, operator: Operator, tmp_path: Path
) -> None:
    namespace = cluster.namespace
    live(cluster)
    wait_for("the count", lambda: value(operator, "jobs", namespace=namespace, state="Complete"), operator.metrics)
    found = operator.metrics()
    assert value(operator, "jobs", namespace=namespace, state="Training") == 1
    assert value(operator, "jobs_created_total", namespace=namespace) == 3
    assert value(operator, "jobs_completed_total", namespace=namespace) == 1
    assert value(operator, "jobs_failed_total", namespace=namespace, reason="InvalidJob") == 1
    restart = {"namespace": namespace, "reason": "OutOfMemory", "counted": "true"}
    assert value(operator, "restarts_total", **restart) == 1
    assert [name for name, _ in found if name == "pseudoreal_restarts_total"] == ["pseudoreal_restarts_total"]
    assert value(operator, "phase_duration_seconds_count") == 3, "the phase that failed has ended as well"
    assert value(operator, "delink_duration_seconds_count") == 1
    assert value(operator, "leader") == 1
    assert (value(operator, "api_requests_total", verb="POST", code="201") or 0) > 5
    assert (value(operator, "reports_total", status="200") or 0) >= 1
    age = value(operator, "checkpoint_age_seconds", namespace=namespace, job_name="training")
    assert age is not None
    assert 0 <= age < 600
    folder = tmp_path / "pod"
    folder.mkdir()
    labels = {"namespace": namespace, "job_name": "training", "phase": "pseudo", "execution": "1"}
    with (
        serving_metrics(_pod(folder), 0) as port,
        prometheus.running(tmp_path, {operator.metrics_port: {}, port or 0: labels}, ALERTS) as scraping,
    ):
        _asks_for_what_is_there(scraping)
        _rules_are_evaluated(scraping)


def _pod(path: Path) -> PodFolder:
    """Return the folder of a training pod."""
    folder = PodFolder(path)
    with Heartbeat(HeartbeatFile(folder.heartbeat(0), pid=1, rank=0)).step():
        pass
    waits = {"data": 0.5, "reductions": 1.0, "updates": 0.25}
    folder.write_progress(ProgressReport.model_validate(progress(5, waits=waits, **EVERYTHING).model_dump()))
    folder.write_checkpoint("pseudo-4", 4)
    return folder


EMPTY = ("pseudoreal_hangs_total", "pseudoreal_jobs_standing", "pseudoreal_reconcile_errors_total")
"""Metrics possibly missing after these jobs."""


def _asks_for_what_is_there(scraping: Prometheus) -> None:
    wait_for("both targets", lambda: scraping.query("count(up == 1) == 2"), lambda: scraping.query("up"))
    wait_for("two looks at them", lambda: scraping.query("count_over_time(pseudoreal_trainer_step[1m]) > 1"))
    known = set(scraping.ask("metadata"))
    texts = [*_expressions(), *(rule["expr"] for group in _groups() for rule in group["rules"])]
    asked = {name for text in texts for name in re.findall(r"\b(?:pseudoreal|process)_[a-z_]+\b", text)}
    assert {_family(name) for name in asked} <= {_family(name) for name in known}
    for expression in _expressions():
        if any(name in expression for name in EMPTY):
            scraping.query(expression)
        else:
            wait_for(expression, lambda text=expression: scraping.query(text))  # type: ignore[misc]


def _family(name: str) -> str:
    """Return the name of the metric of a series; in OpenMetrics, counters have no suffix _total."""
    return re.sub("_(bucket|count|sum|total)$", "", name)


def _rules_are_evaluated(scraping: Prometheus) -> None:
    def rules() -> list[Any]:
        return [rule for group in scraping.ask("rules")["groups"] for rule in group["rules"]]

    wait_for("an evaluation", lambda: all(rule["health"] != "unknown" for rule in rules()), rules)
    assert [rule["name"] for rule in rules() if rule["health"] != "ok"] == []
    fires = {rule["name"] for rule in rules() if rule["state"] == "firing"}
    assert fires == {"PseudoRealJobFailed"}


def _expressions() -> Iterator[str]:
    """Yield the queries of all panels, for all namespaces and jobs."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield re.sub(r"\$\w+", ".*", target["expr"])


def _groups() -> list[Any]:
    return list(yaml.safe_load(ALERTS.read_text())["groups"])


def test_each_alert_fires_at_its_condition_and_not_before() -> None:
    done = promtool("check", "rules", str(ALERTS))
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("test", "rules", str(TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


OPERATOR_POD = {
    "namespace": "pseudoreal",
    "pod_name": "pseudoreal-0",
    "service_name": "pseudoreal-metrics",
    "endpointslice_port_name": "metrics",
}
TRAINING_POD = {
    "namespace": "team",
    "pod_name": "llm-0",
    "pod_phase": "Running",
    "pod_container_port_name": "metrics",
    "pod_label_pseudoreal_dev_stage": "train",
    "pod_label_pseudoreal_dev_job_name": "llm",
    "pod_label_pseudoreal_dev_phase": "real",
    "pod_label_pseudoreal_dev_execution": "2",
}
"""Labels of Prometheus' discovery in Kubernetes, without the prefix __meta_kubernetes_."""


@pytest.mark.parametrize(
    ("job", "pod", "others", "labels"),
    [
        (
            "pseudoreal-operators",
            OPERATOR_POD,
            [{"service_name": "pseudoreal"}, {"endpointslice_port_name": "reports"}],
            {"namespace": "pseudoreal", "pod": "pseudoreal-0"},
        ),
        (
            "pseudoreal-trainers",
            TRAINING_POD,
            [
                {"pod_phase": "Succeeded"},
                {"pod_container_port_name": "http"},
                {"pod_label_pseudoreal_dev_stage": "delink"},
            ],
            {"namespace": "team", "pod": "llm-0", "job_name": "llm", "phase": "real", "execution": "2"},
        ),
    ],
)
def test_the_scrape_configuration_of_the_documents_selects_pods_and_labels_their_series(
    job: str, pod: dict[str, str], others: list[dict[str, str]], labels: dict[str, str], tmp_path: Path
) -> None:
    """Debian's Prometheus has no discovery in Kubernetes: static targets with the labels of this discovery replace
    it."""
    config = prometheus.documented_scrape_configuration()
    for scraping in config["scrape_configs"]:
        del scraping["kubernetes_sd_configs"]
        scraping["static_configs"] = [
            {
                "targets": [f"10.0.0.{number}:80"],
                "labels": {f"__meta_kubernetes_{key}": text for key, text in one.items()},
            }
            for number, one in enumerate([pod, *(pod | other for other in others)])
        ]
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    done = promtool("check", "config", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "service-discovery", "--timeout=1s", str(path), job)
    found = [target["labels"] for target in json.loads(done.stdout)]
    (kept,) = [one for one in found if one]
    assert len(found) == 1 + len(others)
    shown = {name: text for name, text in kept.items() if not name.startswith("__")}
    assert shown == labels | {"job": job, "instance": "10.0.0.0:80"}


def test_each_alert_has_a_firing_and_a_silent_case() -> None:
    tried: dict[str, set[bool]] = {rule["alert"]: set() for group in _groups() for rule in group["rules"]}
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for one in case["alert_rule_test"]:
            tried[one["alertname"]].add(bool(one.get("exp_alerts")))
    assert {name for name, ways in tried.items() if ways != {True, False}} == set()


def test_dashboard_panels_have_titles_and_units_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all("unit" in panel["fieldConfig"]["defaults"] for panel in panels if panel["type"] != "row")
