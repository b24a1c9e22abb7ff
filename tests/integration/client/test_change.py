"""`suspend`, `resume`, `finish-phase` and `repeat-phase` on a real API server."""

from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal.api import Api

from tests.integration.client.conftest import Terminal, training
from tests.support.cluster import Job

pytestmark = pytest.mark.integration

MakeJob = Callable[..., Job]


def test_suspend_and_resume_change_the_spec(terminal: Terminal, make_job: MakeJob) -> None:
    job = make_job("llm", training())
    assert "frees its pods" in terminal.says("suspend", "llm")
    assert job.body["spec"]["suspend"] is True
    result = terminal("suspend", "llm")
    assert (result.exit_code, "suspended already" in result.stderr) == (1, True)
    assert "goes on" in terminal.says("resume", "llm")
    assert job.body["spec"]["suspend"] is False
    assert terminal("resume", "llm").exit_code == 1


def test_requests_are_appended_to_the_spec(terminal: Terminal, make_job: MakeJob) -> None:
    job = make_job("llm", training())
    terminal.says("finish-phase", "llm")
    terminal.says("repeat-phase", "llm", "pseudo")
    assert job.body["spec"]["requests"] == [
        {"id": "finish-real-1", "type": "FinishPhase", "phase": "real"},
        {"id": "repeat-pseudo-1", "type": "RepeatPhase", "phase": "pseudo"},
    ]
    assert terminal("finish-phase", "llm", "real").exit_code == 1
    assert terminal("finish-phase", "llm", "fake").exit_code == 5
    job.cluster.patch_status("llm", {"servedRequests": ["finish-real-1"]})
    assert "finish-real-2" in terminal.says("finish-phase", "llm", "real")


def test_a_change_between_reading_and_writing_is_not_lost(
    terminal: Terminal, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user adds a request right after the job was read."""
    job = make_job("llm", training())
    other = {"id": "theirs", "type": "FinishPhase", "phase": "real"}
    read, reads = Api.job, list[str]()

    def job_then_change(self: Api, namespace: str, name: str) -> Any:
        seen = read(self, namespace, name)
        reads.append(name)
        if len(reads) == 1:
            job.cluster.patch_job(name, {"spec": {"requests": [other]}})
        return seen

    monkeypatch.setattr(Api, "job", job_then_change)
    terminal.says("repeat-phase", "llm", "pseudo")
    assert [request["id"] for request in job.body["spec"]["requests"]] == ["theirs", "repeat-pseudo-1"]
    assert len(reads) == 2


def test_a_user_without_rights_learns_the_missing_role(user: Terminal, make_job: MakeJob) -> None:
    make_job("llm", training())
    result = user("suspend", "llm")
    assert (result.exit_code, "you may not do this" in result.stderr) == (4, True)
