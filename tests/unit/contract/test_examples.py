"""Jobs that the README tells users to start can run."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.spec.check import check_job

from tests.support.jobs import example_jobs


@pytest.mark.parametrize("body", example_jobs(), ids=lambda body: body["metadata"]["name"])
def test_an_example_passes_the_local_check(body: dict[str, Any]) -> None:
    job = check_job(body)
    check_resolvable(job.spec)
    assert [phase.name for phase in job.spec.phases] in (["pseudo", "real"], ["shallow", "deep", "real"], ["real"])


def test_the_job_in_the_readme_is_the_least_that_runs() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    (body,) = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    job = check_job(body)
    check_resolvable(job.spec)
    assert [phase.name for phase in job.spec.phases] == ["pseudo", "real"]
    assert body["spec"].keys() == {"model", "data", "phases"}
