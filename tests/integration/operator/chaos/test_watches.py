"""Ended watches are started again, and the operator goes on."""

import pytest

from tests.integration.operator.chaos.support.faults import Fault, Kind, Target
from tests.integration.operator.chaos.support.lives import Lives
from tests.support.patience import wait_for

pytestmark = pytest.mark.integration

EARLY = 3


def test_a_watch_that_is_cut_or_expires_is_taken_up_again(lives: Lives) -> None:
    with lives.life("taken-up", Fault(Kind.CUT, Target.JOB_CHANGE, EARLY)) as life:
        life.create()
        life.until("the cut", lambda: life.proxy.struck)
        life.proxy.inject(Fault(Kind.ERROR_410, Target.JOB_CHANGE, life.proxy.counts[Target.JOB_CHANGE] + 2))
        assert life.live_on().end["state"] == "Complete"
        assert life.proxy.struck
        wait_for("a look of the probe", lambda: life.operator.health()["watchers"] == 4, life.explain)
        assert life.starts == 1


def test_a_watch_of_jobs_that_fails_is_begun_again(lives: Lives) -> None:
    with lives.life("failed", Fault(Kind.ERROR_500, Target.JOB_CHANGE, EARLY)) as life:
        life.create()
        life.until("the failure", lambda: life.proxy.struck)
        assert life.live_on().end["state"] == "Complete"
        assert life.starts == 1


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ERROR_410, Kind.ERROR_500])
def test_a_watch_of_children_outlives_whatever_ends_it(lives: Lives, kind: Kind) -> None:
    """Missed changes are listed after the restart of the watch; no later event would show them."""
    with lives.life(f"children-{kind.name.lower().replace('_', '-')}") as life:
        life.create()
        life.until("the first child", lambda: life.job.child_jobs())
        for number in (1, 3, 5):
            life.proxy.inject(Fault(kind, Target.CHILD_CHANGE, life.proxy.counts[Target.CHILD_CHANGE] + number))
            life.until("the fault", lambda: life.proxy.struck)
        assert life.live_on().end["state"] == "Complete"
        assert life.starts == 1


def test_a_kind_that_kopf_does_not_find_at_its_start_is_looked_for_again(lives: Lives) -> None:
    with lives.life("blind", Fault(Kind.ANSWER_404, Target.DISCOVERY, 1)) as life:
        life.create()
        life.until("the first child", lambda: life.job.child_jobs())
        assert life.operator.lines("kopf_ended")
        assert life.starts == 1
