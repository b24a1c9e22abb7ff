"""Training pods serve metrics if the site wants it, and only to the scrapers that it names."""

from dataclasses import replace
from typing import Any

from pseudoreal_operator.settings import Settings

from tests.unit.operator.manifests.support.rendered import DELINK, TRAIN, container_of, environment_of, made, rendered
from tests.unit.operator.support.world import SETTINGS

Json = dict[str, Any]
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
SCRAPED = replace(SETTINGS, trainer_metrics_port=9464, scrapers=(MONITORING,))
VARIABLE = "PSEUDOREAL_METRICS_PORT"


def of(settings: Settings, **changes: Any) -> dict[str, Json]:
    return rendered(TRAIN, 3, {"settings": settings}, **changes)


def test_pods_serve_no_metrics_by_default() -> None:
    assert VARIABLE not in environment_of(made())
    assert "ports" not in container_of(made())


def test_training_pod_serves_metrics_to_named_scrapers() -> None:
    found = of(SCRAPED)
    assert environment_of(found)[VARIABLE] == "9464"
    assert container_of(found)["ports"] == [{"name": "metrics", "containerPort": 9464}]
    own, scraping = found["NetworkPolicy"]["spec"]["ingress"]
    assert made()["NetworkPolicy"]["spec"]["ingress"] == [own]
    assert scraping == {"from": [MONITORING], "ports": [{"port": 9464, "protocol": "TCP"}]}


def test_no_scraper_reaches_the_metrics_by_default() -> None:
    """An ingress rule without peers would admit everybody."""
    found = of(replace(SCRAPED, scrapers=()))
    assert VARIABLE in environment_of(found)
    assert found["NetworkPolicy"] == made()["NetworkPolicy"]
    assert of(replace(SCRAPED, trainer_metrics_port=None)) == made()


def test_pods_in_the_host_network_serve_no_metrics() -> None:
    network = {"hostNetwork": True}
    assert of(SCRAPED, spec__network=network) == made(spec__network=network)


def test_delink_serves_no_metrics() -> None:
    assert rendered(DELINK, 3, {"settings": SCRAPED}) == made(DELINK)
