"""Files of the charts besides the templates: values, their schema and README, and the metadata for Artifact Hub."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_api.publish.crd import to_yaml
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_dev.machine import paths, version
from pseudoreal_dev.release.chart_readme import CHARTS, Value, readme, values

Json = dict[str, Any]

OPEN = {
    "global",
    "operator.resources.claims[]",
    "operator.extraEnv[].valueFrom",
    "operator.affinity.nodeAffinity",
    "operator.affinity.podAffinity",
    "operator.affinity.podAntiAffinity",
    "metrics.scrapers[]",
    "networkPolicy.from[]",
    "text.volume",
}
"""Kubernetes objects, which the API server validates, and the values that Helm passes to subcharts."""
OPTIONAL = {"global"}
"""Values without a default."""


def schema_of(chart: Path) -> Json:
    schema: Json = json.loads((chart / "values.schema.json").read_text())
    return schema


def defaults_of(chart: Path) -> Json:
    defaults: Json = yaml.safe_load((chart / "values.yaml").read_text())
    return defaults


def nodes(schema: Json, node: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the path and the schema of every node below `node`."""
    if "$ref" in node:
        node = schema["definitions"][node["$ref"].rpartition("/")[2]]
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(schema, child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from nodes(schema, node["items"], f"{path}[]")


def leaves(defaults: Any, path: str = "") -> Iterator[str]:
    yield path
    if isinstance(defaults, dict):
        for name, child in defaults.items():
            yield from leaves(child, f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_schema_knows_every_value_and_no_other(chart: Path) -> None:
    schema, defaults = schema_of(chart), defaults_of(chart)
    known = dict(nodes(schema, schema))
    maps = [path for path, node in known.items() if isinstance(node.get("additionalProperties"), dict)]
    unknown = {path for path in leaves(defaults) if path not in known}
    assert {path for path in unknown if not any(path.startswith(f"{one}.") for one in maps)} == set()
    loose = {
        path for path, node in known.items() if node.get("type") == "object" and "additionalProperties" not in node
    }
    assert loose <= OPEN
    assert not [path for path, node in known.items() if not {"type", "enum"} & node.keys()], (
        "every node of the schema has a type"
    )


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_every_value_of_the_schema_has_a_default(chart: Path) -> None:
    schema, named = schema_of(chart), set(leaves(defaults_of(chart)))
    of_kubernetes = ("operator.resources.", "operator.affinity.")
    wanted = {path for path, _ in nodes(schema, schema) if "[]" not in path and not path.startswith(of_kubernetes)}
    assert wanted - named == OPTIONAL


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_every_value_is_described(chart: Path) -> None:
    """Each value has a comment of its own; `enabled` is described by the comment of its group."""
    found = [*values((chart / "values.yaml").read_text())]
    described = {value.name for value in found if value.text}
    groups = [value.name.rpartition(".")[0] for value in found if not value.text]
    assert set(groups) <= described
    undescribed = {value.name.rpartition(".")[2] for value in found if not value.text}
    assert undescribed <= {"enabled", "requests", "limits"}


def test_values_are_read_with_their_comments() -> None:
    text = """# Of the whole
# group.
group:
  # One | two.
  inner: {a: 1, b: [x, y]}
  plain: "#"

# Alone.

last: []
"""
    assert [*values(text)] == [
        Value("group", "", "Of the whole group."),
        Value("group.inner", "{a: 1, b: [x, y]}", "One | two."),
        Value("group.plain", '"#"', ""),
        Value("last", "[]", ""),
    ]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_the_readme_is_that_of_the_values(chart: Path) -> None:
    """`make generate` rewrites the README."""
    assert (chart / "README.md").read_text() == readme(chart)


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)
def test_charts_have_the_version_of_the_project(chart: Path) -> None:
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    project = tomllib.loads((paths.REPOSITORY / "pyproject.toml").read_text())["project"]
    assert about["version"] == about["appVersion"] == version.semantic(version.read())
    assert about["annotations"]["artifacthub.io/license"] == project["license"]


def test_artifact_hub_shows_the_kind_and_a_job() -> None:
    about = yaml.safe_load((CHARTS[0] / "Chart.yaml").read_text())
    shown = {key.removeprefix("artifacthub.io/"): value for key, value in about["annotations"].items()}
    (kind,) = yaml.safe_load(shown["crds"])
    definition = yaml.safe_load(to_yaml())
    assert kind["name"] == definition["metadata"]["name"]
    assert kind["kind"] == definition["spec"]["names"]["kind"]
    assert kind["version"] in [version["name"] for version in definition["spec"]["versions"]]
    (example,) = yaml.safe_load(shown["crdsExamples"])
    job = PseudoRealJob.from_object(example | {"metadata": example["metadata"] | {"namespace": "default", "uid": "1"}})
    assert [phase.name for phase in job.spec.phases] == ["pseudo", "real"]
    assert "images" not in shown, "none is published"
