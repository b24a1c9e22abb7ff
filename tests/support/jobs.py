"""The good job and the bad jobs of tests/data/jobs.yaml, and the jobs of examples/."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_EXAMPLES = Path(__file__).parents[2] / "examples"
_CASES = yaml.safe_load((Path(__file__).parents[1] / "data" / "jobs.yaml").read_text())


@dataclass(frozen=True)
class GoodJob:
    name: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadJob:
    name: str
    body: dict[str, Any]
    says: list[str]


def good_job(name: str = "good", /, **changes: Any) -> dict[str, Any]:
    """Return the good job; `changes` maps paths, with __ instead of dots, to new values."""
    body: dict[str, Any] = copy.deepcopy(_CASES["good"])
    body["metadata"]["name"] = name
    for path, value in changes.items():
        _set(body, path.replace("__", ".").split("."), value)
    return body


def minimal_job(name: str = "good") -> dict[str, Any]:
    """Return the good job without the fields with defaults."""
    body = good_job(name)
    del body["spec"]["checkpoint"]
    return body


def other_good_jobs() -> list[GoodJob]:
    return [GoodJob(case["name"], _changed(case["set"])) for case in _CASES["also good"]]


def bad_jobs() -> list[BadJob]:
    return [BadJob(case["name"], _changed(case["set"]), case["says"]) for case in _CASES["bad"]]


def example_jobs() -> list[dict[str, Any]]:
    files = [*sorted(_EXAMPLES.glob("*.yaml")), *sorted(_EXAMPLES.glob("gpu/*.yaml"))]
    documents = (body for path in files for body in yaml.safe_load_all(path.read_text()))
    return [body for body in documents if body["kind"] == "PseudoRealJob"]


def _changed(changes: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = copy.deepcopy(_CASES["good"])
    for path, value in changes.items():
        _set(body, path.split("."), value)
    return body


def _set(body: Any, path: list[str], value: Any) -> None:
    for key in path[:-1]:
        body = body[int(key)] if isinstance(body, list) else body.setdefault(key, {})
    if isinstance(body, list):
        body[int(path[-1])] = value
    else:
        body[path[-1]] = value
