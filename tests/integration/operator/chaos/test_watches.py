"""What the operator, its liveness probe and the kubelet make of watches that end."""

import pytest

from tests.integration.operator.chaos.faults import Fault, Kind, Target
from tests.integration.operator.chaos.life import Life
from tests.integration.operator.chaos.lives import Lives
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


def _is_ill(life: Life) -> bool:
    return not life.operator.is_running or life.health() == 500


def test_an_operator_whose_watch_of_jobs_fails_is_started_again(lives: Lives) -> None:
    with lives.life("failed", Fault(Kind.ERROR_500, Target.JOB_CHANGE, EARLY)) as life:
        life.create()
        life.until("the failure", lambda: life.proxy.struck)
        # This kopf ends the operator; of one that does not, the probe must tell.
        wait_for("what a kubelet sees", lambda: life.starts > 1 or _is_ill(life), life.explain)
        life.until("the next stage", lambda: life.job.status.checkpoint)
        assert life.starts == 2


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.ERROR_410, Kind.ERROR_500])
def test_a_watch_of_children_outlives_whatever_ends_it(lives: Lives, kind: Kind) -> None:
    """What it did not tell is asked for: no look that comes later would show it."""
    with lives.life(f"children-{kind.name.lower().replace('_', '-')}") as life:
        life.create()
        life.until("the first child", lambda: life.job.child_jobs())
        for number in (1, 3, 5):
            life.proxy.inject(Fault(kind, Target.CHILD_CHANGE, life.proxy.counts[Target.CHILD_CHANGE] + number))
            life.until("the fault", lambda: life.proxy.struck)
        assert life.live_on().end["state"] == "Complete"
        assert life.starts == 1


def test_the_probe_tells_of_a_kind_that_is_not_watched(lives: Lives) -> None:
    with lives.life("blind", Fault(Kind.ANSWER_404, Target.DISCOVERY, 1)) as life:
        life.create()
        life.operator.start()
        wait_for("the probe's failure", lambda: life.health() == 500, life.explain)
        assert life.operator.is_running, "nothing else tells"
        assert "status" not in life.job.body, "nobody has seen the job"
        life.operator.kill()
        life.until("the first child", lambda: life.job.child_jobs())
