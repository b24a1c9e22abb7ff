"""Generates docs/tested.md, what has run where: from pinned versions, the workflows, and docs/data/tested.json."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths

Json = dict[str, Any]

FACTS = paths.REPOSITORY / "docs" / "data" / "tested.json"
GPU = paths.REPOSITORY / "docs" / "data" / "gpu-bench.json"
DOCUMENT = paths.REPOSITORY / "docs" / "tested.md"
UNTRIED = "**untried**"
_HEAD = f"""<!-- Written by `make generate` from docs/data/tested.json, dev/tools, requirements and the workflows. -->
# What has run where

In a row, {UNTRIED} means: this project has code for the machine, program or task that the row names, but nobody has
run this code there. Only linters, schemas and tests with fakes have checked the code of an untried row, so expect
mistakes in this code. [Support](support.md) says where pseudoreal is meant to work."""
_WORKFLOWS = paths.REPOSITORY / ".github" / "workflows"
_NEIGHBOURS = (
    (
        "Kueue",
        "kueue",
        "sigs.k8s.io/kueue",
        "tests use it for jobs in queues, for topology, and for MultiKueue between two control planes",
    ),
    (
        "scheduler-plugins",
        "coscheduling",
        "sigs.k8s.io/scheduler-plugins",
        "tests use it for gangs of pods, on simulated nodes without containers",
    ),
    (
        "Kubeflow Trainer",
        "trainer",
        "github.com/kubeflow/trainer/v2",
        "a benchmark compares it with pseudoreal's operator",
    ),
    ("JobSet", "jobset", "sigs.k8s.io/jobset", "a benchmark compares it with pseudoreal's operator"),
    (
        "Kubeflow training operator",
        "training-operator",
        "github.com/kubeflow/training-operator",
        "a benchmark compares it with pseudoreal's operator",
    ),
)
"""Name, folder below dev/tools, Go module, and what runs."""


def to_markdown() -> str:
    facts = json.loads(FACTS.read_text())
    tables = (_machines(facts), _kubernetes(facts), _neighbours(), _accelerators(), _models(facts), _times(facts))
    return "\n\n".join([_HEAD, *tables]) + "\n"


def write() -> None:
    DOCUMENT.write_text(to_markdown())


def _machines(facts: Json) -> str:
    rows = [
        (
            f"{run['system']}, {run['architecture']}, Python {run['python']}",
            f"all {sum(run['passed'].values()):,} tests: tests without Kubernetes, tests with an API server, and tests"
            " with a cluster",
            f"passed on {run['date']}, commit {run['commit']}",
        )
        for run in facts["runs"]
    ]
    rows += [(_runner(name), "`make test-unit`, in a GitHub workflow", UNTRIED) for name in _matrix("ci", "unit", "os")]
    rows += [
        ("macOS", "`make run` trains examples/laptop.yaml as local processes", UNTRIED),
        ("Windows", "nothing has run there; the client may work, because it needs only Python", UNTRIED),
        ("arm64", "the images for arm64, which `make release` builds if the machine can emulate arm64", UNTRIED),
    ]
    return _section("Machines", ("machine", "what runs on it", "result"), rows)


def _kubernetes(facts: Json) -> str:
    built = [
        (
            binaries.version(),
            "the tests of the API, on the API server and the controllers; the tests on a cluster of one node; the demo",
            ["api-server", "cluster"],
        )
    ]
    for minor in binaries.minors():
        built.append(
            (
                binaries.version(minor),
                "the tests of the API, on the API server and the controllers, without nodes",
                [f"api-server-{minor}"],
            )
        )
    rows = [
        (f"{version.removeprefix('v')}, built from its Go module", what, _result(facts, parts))
        for version, what, parts in sorted(built, key=lambda row: _numbers(row[0]))
    ]
    nodes = [image.partition(":v")[2].partition("@")[0] for image in _matrix("kind", "demo", "node")]
    rows += [(f"{node}, kind", "the quickstart, in a GitHub workflow", UNTRIED) for node in sorted(nodes, key=_numbers)]
    rows += [
        ("minikube, k3d, k3s", "the quickstart", UNTRIED),
        (
            "EKS, GKE, AKS, OpenShift",
            "nothing has run there; tests compare the rendered chart with OpenShift's rules",
            UNTRIED,
        ),
    ]
    return _section("Kubernetes", ("version", "what runs on it", "result"), rows)


def _neighbours() -> str:
    rows = [
        (name, _pinned(paths.TOOLS / folder / "go.mod", module), what) for name, folder, module, what in _NEIGHBOURS
    ]
    rows.append(("Volcano", "–", f"tests create PodGroups of Volcano; the scheduler of Volcano is {UNTRIED}"))
    rows.append(
        (
            "Helm",
            _pinned(paths.TOOLS / "go.mod", "helm.sh/helm/v3"),
            "tests and the demo use its commands install, upgrade and test",
        )
    )
    rows.append(("PyTorch", _locked("torch"), "all tests of the trainer use it, on CPUs"))
    return _section("Other programs", ("program", "version", "how this project has used it"), rows)


def _accelerators() -> str:
    rows = [
        ("one GPU of NVIDIA", "`make test-gpu`, `make gpu-bundle`", _on_a_gpu()),
        (
            "NCCL, RDMA, several GPUs of a node",
            "`make test-gpu`, `make gpu-bundle`. The tests on CPUs use gloo in place of NCCL",
            UNTRIED,
        ),
        ("GPUs of other vendors, TPUs", "nothing", "not supported"),
        (
            "publishing (`.github/workflows/release.yml`)",
            "this workflow publishes images, charts and attestations",
            UNTRIED,
        ),
    ]
    return _section("Accelerators and publishing", ("hardware or task", "what tests or does it", "result"), rows)


def _on_a_gpu() -> str:
    """Return the GPU and the date of the results; without results, that nothing ran."""
    if not GPU.exists():
        return UNTRIED
    machine = json.loads(GPU.read_text())["machine"]
    device, torch, date = machine["device"], machine["versions"]["torch"], machine["date"][:10]
    return f"[some tests and benchmarks of these commands ran](benchmarks/gpu.md) on {date}: {device}, torch {torch}"


def _models(facts: Json) -> str:
    largest = sorted(facts["models"], key=lambda model: model["parameters"])
    rows = [
        (model["what"], f"{model['parameters'] / 1e6:,.0f} M", f"[{model['document']}]({model['document']})")
        for model in largest
    ]
    rows.append(
        (
            "two larger models, each trained for only a few steps of a benchmark",
            "302.6 M, 1 B",
            "[on CPUs](benchmarks/steps.md), [on a GPU](benchmarks/gpu.md)",
        )
    )
    rows.append(
        (
            "the jobs of ten trillion parameters in [examples](../examples)",
            "10 T",
            "nowhere; `pseudoreal plan` plans these jobs",
        )
    )
    return _section("Sizes of models", ("model", "parameters", "where it was trained"), rows)


def _times(facts: Json) -> str:
    rows = [(time["what"], _duration(time["seconds"]), time["machine"], time["date"]) for time in facts["times"]]
    return _section("Times", ("command", "time", "machine", "measured on"), rows)


def _result(facts: Json, parts: Sequence[str]) -> str:
    """Return how many tests of these parts of the suite passed, for each machine on which they ran."""
    found = [(run, sum(run["passed"].get(part, 0) for part in parts)) for run in facts["runs"]]
    told = [f"{tests:,} tests passed on {run['date']}, {run['system']}" for run, tests in found if tests]
    return "; ".join(told) or UNTRIED


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _matrix(workflow: str, job: str, name: str) -> list[str]:
    body = yaml.safe_load((_WORKFLOWS / f"{workflow}.yml").read_text())
    return [*body["jobs"][job]["strategy"]["matrix"][name]]


def _runner(name: str) -> str:
    system, _, rest = name.partition("-")
    architecture = "arm64" if system == "macos" or rest.endswith("-arm") else "x86_64"
    return f"{ {'ubuntu': 'Ubuntu', 'macos': 'macOS'}[system] } {rest.removesuffix('-arm')}, {architecture}"


def _pinned(module: Path, name: str) -> str:
    found = re.search(rf"^(?:require )?\s*{re.escape(name)} v(\S+)", module.read_text(), re.MULTILINE)
    assert found, f"{module} requires {name}"
    return found[1]


def _locked(name: str) -> str:
    locked = (paths.REPOSITORY / "requirements" / "trainer.txt").read_text()
    found = re.search(rf"^{name}==(\S+)", locked, re.MULTILINE)
    assert found, f"requirements/trainer.txt has {name}"
    return found[1]


def _duration(seconds: int) -> str:
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min {seconds % 60} s"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    write()
