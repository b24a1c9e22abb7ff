"""Health of a job in Argo CD and Flux: the chart's health check, run by Lua as Argo CD runs it, and the expressions
of docs/gitops.md, on statuses as the operator writes them."""

import re
from typing import Any

import cel
import pytest
import yaml
from lupa import lua51
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_dev.machine import paths
from pseudoreal_operator.lifecycle.plan import plan_blocked, plan_rejected, plan_unreadable

from tests.unit.operator.lifecycle.support.steps import condition_message, fail_execution, run_until, start_job
from tests.unit.operator.support.world import World, make_job

Json = dict[str, Any]

HEALTH = paths.REPOSITORY / "charts/pseudoreal/files/argocd-health.lua"
PAGE = paths.REPOSITORY / "docs/gitops.md"


def health(status: Json | None, generation: int = 1) -> tuple[str, str]:
    """Return status and message, in a Lua of the version that Argo CD embeds."""
    lua = lua51.LuaRuntime()
    body: Json = {"metadata": {"generation": generation}} | ({} if status is None else {"status": status})
    lua.globals().obj = lua.table_from(body, recursive=True)
    found = lua.execute(HEALTH.read_text())
    return found.status, found.message


def of(world: World, generation: int = 1) -> tuple[str, str]:
    return health(world.status.to_dict(), generation)


def flux(status: Json) -> tuple[bool, bool]:
    """Return whether Flux considers the job current, and whether failed."""
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE.read_text(), re.DOTALL)
    (checks,) = yaml.safe_load(text)["spec"]["healthCheckExprs"]
    context = cel.Context({"status": status})
    return cel.evaluate(checks["current"], context), cel.evaluate(checks["failed"], context)


def test_job_without_status_is_progressing() -> None:
    unseen: list[Json | None] = [None, {}, {"conditions": []}]
    for status in unseen:
        assert health(status) == ("Progressing", "The operator has not seen this version of the job yet.")
    assert flux({}) == (False, False)


def test_training_job_is_progressing_and_says_how() -> None:
    world = start_job()
    assert of(world) == ("Progressing", condition_message(world, "Progressing"))
    assert of(world, generation=2)[1] == "The operator has not seen this version of the job yet."
    assert flux(world.status.to_dict()) == (False, False)


def test_a_job_that_is_complete_is_healthy() -> None:
    world = World(make_job())
    world.run_fairly()
    assert of(world) == ("Healthy", condition_message(world, "Complete"))
    assert of(world, generation=2)[0] == "Healthy", "what has ended stays so"
    assert flux(world.status.to_dict()) == (True, False)


def test_a_job_that_failed_is_degraded() -> None:
    world = start_job(spec__restart={"maxRestarts": 0, "inPlace": 0})
    fail_execution(world)
    world.settle()
    assert of(world) == ("Degraded", condition_message(world, "Failed"))
    assert flux(world.status.to_dict()) == (False, True)


def test_rejected_job_is_degraded() -> None:
    world = World(make_job())
    world.plan()
    world.carry_out(plan_rejected(world.observe(), "no such image", world.now))
    assert of(world) == ("Degraded", condition_message(world, "Failed"))


def test_suspended_job_is_suspended() -> None:
    world = World(make_job(spec__suspend=True))
    world.settle()
    assert of(world) == ("Suspended", condition_message(world, "Suspended"))


def test_job_that_needs_a_user_is_degraded() -> None:
    world = run_until(World(make_job()), "real")
    world.carry_out(plan_blocked(world.observe(), "exceeded quota", world.now))
    assert of(world) == ("Degraded", condition_message(world, "Progressing"))
    metadata = world.observe().job.metadata
    unread = plan_unreadable(metadata, PseudoRealJobStatus(), "no such field", world.now).status
    assert health(unread.to_dict(), generation=7)[0] == "Degraded"


@pytest.mark.parametrize("reason", ["Queued", "Unschedulable", "Starting"])
def test_waiting_job_is_progressing(reason: str) -> None:
    waits = {"type": "Progressing", "status": "False", "reason": reason, "message": "It waits."}
    assert health({"observedGeneration": 1, "conditions": [waits]}) == ("Progressing", "It waits.")
