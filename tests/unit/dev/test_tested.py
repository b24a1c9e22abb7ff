"""What has run where: the document follows from recorded facts, and the README says nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_dev import tested
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths
from pseudoreal_trainer.plan.units import units_of

from benchmarks.cases import MODELS
from benchmarks.moe.steps import growth
from tests.support import recorded
from tests.support.suite import Result, minor_parts

Json = dict[str, Any]

README = (paths.REPOSITORY / "README.md").read_text()
FACTS: Json = json.loads(tested.FACTS.read_text())
MACHINE = {"system": "Debian 12", "architecture": "x86_64", "python": "3.11", "date": "2026-01-02", "commit": "0" * 8}


def rows(title: str) -> list[str]:
    """Return the rows of a table of the document."""
    table = tested.to_markdown().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return table.strip().splitlines()[2:]


def results(**outcomes: str) -> dict[str, list[Result]]:
    """Return one test for each part of the suite. `outcomes`: part -> what became of it, if it did not pass."""
    return {
        part.name: [Result(f"tests/{part.name}.py::test_it", 1.0, outcomes.get(part.name, "passed"))]  # type: ignore[arg-type]
        for part in (*recorded.REQUIRED, *minor_parts(is_deep=True)[1:])
    }


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Json:
    """Facts of which the document is made: a run of all tests, each part with one test."""
    found = FACTS | {"runs": [recorded.record(results(), MACHINE)]}
    monkeypatch.setattr(tested, "FACTS", tmp_path / "tested.json")
    tested.FACTS.write_text(json.dumps(found))
    return found


@pytest.mark.usefixtures("facts")
def test_each_version_of_kubernetes_has_the_tests_that_ran_on_it() -> None:
    found = [row for row in rows("Kubernetes") if tested.UNTRIED not in row]
    versions = sorted([binaries.version(), *map(binaries.version, binaries.minors())])
    assert [row.split()[1].removesuffix(",") for row in found] == [version.removeprefix("v") for version in versions]
    assert ["2 tests passed" in row for row in found] == [version == binaries.version() for version in versions]
    assert all(re.search(r"[12] tests passed on 2026-01-02, Debian 12", row) for row in found)


@pytest.mark.usefixtures("facts")
def test_what_a_workflow_would_run_is_untried() -> None:
    machines = rows("Machines")
    assert f"all {len(results())} tests" in machines[0]
    assert "passed on 2026-01-02, commit 00000000" in machines[0]
    assert all(any(name in row and tested.UNTRIED in row for row in machines) for name in ("Ubuntu 24.04", "macOS 15"))
    assert all(tested.UNTRIED in row for row in rows("Kubernetes") if ", kind" in row)


def test_without_a_run_all_is_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "FACTS", tmp_path / "tested.json")
    tested.FACTS.write_text(json.dumps(FACTS | {"runs": []}))
    assert all(tested.UNTRIED in row for row in rows("Kubernetes"))


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_run_with_a_failure_is_not_recorded(outcome: str) -> None:
    with pytest.raises(SystemExit, match=r"1 tests did not pass, first tests/units\.py::test_it"):
        recorded.record(results(units=outcome), MACHINE)


def test_a_run_without_a_part_is_not_recorded() -> None:
    with pytest.raises(SystemExit, match="No test of cluster ran"):
        recorded.record(results(cluster="skipped"), MACHINE)


def test_sizes_of_models_are_those_that_the_benchmarks_trained() -> None:
    dense = MODELS["hundred"].spec
    wanted = sum(unit.numel for unit in units_of(dense, Sharing(blocks=dense.layers)))
    experts = 2 * growth.LAYERS * max(growth.COUNTS) * growth.HIDDEN * growth.EXPERT_SIZE
    assert sorted(model["parameters"] for model in FACTS["models"]) == sorted([wanted, experts])


class TestTheReadme:
    def test_names_the_largest_models(self) -> None:
        item = README.partition("- pseudoreal has been run")[2].partition("\n- ")[0]
        millions = sorted(f"{model['parameters'] / 1e6:.0f}" for model in FACTS["models"])
        assert sorted(re.findall(r"(\d+) M\b", item)) == millions

    def test_states_the_times_that_were_measured(self) -> None:
        minutes = {str(round(time["seconds"] / 60)) for time in FACTS["times"]}
        stated = re.findall(r"took (\d+) minutes", README)
        assert stated
        assert set(stated) <= minutes

    def test_asks_for_the_oldest_minor_on_which_the_tests_run(self) -> None:
        assert re.findall(r"Kubernetes (1\.\d+)", README) == binaries.minors()[:1]

    def test_links_what_has_run_where(self) -> None:
        assert "(docs/tested.md)" in README
