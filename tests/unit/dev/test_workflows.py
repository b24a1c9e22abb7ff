"""Workflows: what they run exists, actions are pinned by commit, and no job may do more or longer than it needs."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths

Json = dict[str, Any]

FOLDER = paths.REPOSITORY / ".github"
WORKFLOWS = {file.stem: file.read_text() for file in sorted(FOLDER.glob("workflows/*.yml"))}
FILES = WORKFLOWS | {"setup": (FOLDER / "actions/setup/action.yml").read_text()}
PIN = re.compile(r"uses: ([\w.-]+/[\w./-]+)@(\S+)(?: # (\S+))?")
WRITES = {"release.publish": {"contents", "packages", "id-token", "attestations"}, "release.site": {"contents"}}
"""Job -> what it may write."""


def jobs() -> list[tuple[str, Json]]:
    parsed = {name: yaml.safe_load(text) for name, text in WORKFLOWS.items()}
    return [(f"{name}.{job}", body) for name, workflow in parsed.items() for job, body in workflow["jobs"].items()]


def steps() -> list[Json]:
    return [step for _, job in jobs() for step in job.get("steps", [])]


def pins() -> list[tuple[str, str, str]]:
    return [match for text in FILES.values() for match in PIN.findall(text)]


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    for action, commit, version in pins():
        assert re.fullmatch("[0-9a-f]{40}", commit), f"{action}@{commit}"
        assert re.fullmatch(r"v\d+\.\d+\.\d+", version), f"{action} does not say which version its commit is"


def test_an_action_has_the_same_commit_everywhere() -> None:
    assert len({action for action, _, _ in pins()}) == len(set(pins()))


def test_each_mention_of_an_action_is_understood_here() -> None:
    mentions = [line for text in FILES.values() for line in text.splitlines() if re.search(r"\buses:", line)]
    local = [line for line in mentions if "uses: ./.github/" in line]
    assert len(mentions) == len(pins()) + len(local)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_reads_and_replaces_its_older_runs(name: str) -> None:
    workflow = yaml.safe_load(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]


@pytest.mark.parametrize(("name", "job"), jobs())
def test_a_job_writes_only_what_it_publishes_and_ends(name: str, job: Json) -> None:
    writable = {scope for scope, right in job.get("permissions", {}).items() if right != "read"}
    assert writable == WRITES.get(name, set())
    assert "uses" in job or 0 < job["timeout-minutes"] <= 360


def test_no_step_finds_credentials_of_the_checkout() -> None:
    found = [step["with"] for step in steps() if step.get("uses", "").startswith("actions/checkout@")]
    assert found
    assert all(given["persist-credentials"] is False for given in found)


def test_a_script_contains_no_value_from_outside() -> None:
    """A value written into a script is code there; variables of the environment are data."""
    assert not [step["run"] for step in steps() if "${{" in step.get("run", "")]


def test_the_targets_of_make_exist() -> None:
    lines = re.findall(r"^\.PHONY: (.*)", (paths.REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    known = {name for line in lines for name in line.split()}
    named = {
        target
        for step in steps()
        for words in re.findall(r"\bmake ([^\n|&]+)", step.get("run", ""))
        for target in re.findall(r"(?<!\S)[a-z][a-z-]+(?!\S)", words)
    }
    tested = {"lint", "test-unit", "test-integration", "test-minors", "test-deep", "demo"}
    assert named >= {*tested, "site", "site-version"}
    assert named <= known


def test_the_targets_of_make_select_tests_that_exist() -> None:
    """pytest with a name that no test has runs nothing."""
    selected = re.findall(r"(\S+/test_\S+\.py) -k (\w+)", (paths.REPOSITORY / "Makefile").read_text())
    assert selected
    for path, name in selected:
        tests = re.findall(r"^def (test_\w+)", (paths.REPOSITORY / path).read_text(), re.MULTILINE)
        assert any(name in test for test in tests), (path, name)


def test_kind_has_nodes_of_the_oldest_and_the_newest_minor() -> None:
    (job,) = (job for name, job in jobs() if name == "kind.demo")
    images = job["strategy"]["matrix"]["node"]
    minors = []
    for image in images:
        match = re.fullmatch(r"kindest/node:v(1\.\d+)\.\d+@sha256:[0-9a-f]{64}", image)
        assert match, image
        minors.append(match[1])
    assert set(minors) >= {*binaries.minors(), ".".join(binaries.version().removeprefix("v").split(".")[:2])}
    assert len(set(minors)) == len(images)


def test_each_set_of_programs_is_kept_under_its_own_name() -> None:
    """A cache is written once: under a shared name, the first job to end would keep out the programs of the others."""
    named = [(job, step["with"]["programs"]) for _, job in jobs() for step in job.get("steps", []) if _programs(step)]
    sets = [name for _, name in named]
    assert len(sets) >= 4
    assert len({*sets}) == len(sets)
    for job, name in named:
        variables = job.get("strategy", {}).get("matrix", {})
        assert all(f"matrix.{variable}" in name for variable in variables)
    (cache,) = (step for step in yaml.safe_load(FILES["setup"])["runs"]["steps"] if "cache@" in step["uses"])
    assert cache["with"]["key"] == cache["with"]["restore-keys"] + "${{ inputs.programs }}"


def _programs(step: Json) -> bool:
    return bool(step.get("with", {}).get("programs"))


def test_jobs_with_tests_of_upgrades_have_the_history() -> None:
    """In a shallow clone, these tests skip."""
    found = 0
    for name, job in jobs():
        if any(re.search(r"make test-(integration|e2e)\b", step.get("run", "")) for step in job.get("steps", [])):
            (checkout,) = (step["with"] for step in job["steps"] if "actions/checkout@" in step.get("uses", ""))
            assert checkout.get("fetch-depth") == 0, name
            found += 1
    assert found >= 1


@pytest.mark.parametrize(("tag", "mark"), [("v0.4.0", ""), ("v0.4.0-rc.1", "--prerelease ")])
def test_a_release_candidate_is_not_shown_as_the_latest_release(tag: str, mark: str, tmp_path: Path) -> None:
    """The images are not among the files of the page."""
    (script,) = (step["run"] for step in steps() if step.get("name") == "Publish the files")
    (tmp_path / "dist").mkdir()
    for name in ("install.yaml", "pseudoreal-operator-1.oci.tar", "pseudoreal-1.chart.oci.tar"):
        (tmp_path / "dist" / name).touch()
    (tmp_path / "gh").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "gh").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_REF_NAME": tag}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"release create {tag} {mark}--verify-tag ")
    files = done.stdout.split("dist/RELEASE_NOTES.md ")[1].split()
    assert sorted(files) == ["dist/install.yaml", "dist/pseudoreal-1.chart.oci.tar"]
