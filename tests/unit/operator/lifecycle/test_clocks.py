"""The clocks of membership belong together, on both sides."""

from pseudoreal_api.wire.reports import REPORT_SECONDS
from pseudoreal_operator.lifecycle.clocks import ORIGIN_SECONDS, SPARE_SECONDS, STOP_SECONDS, STUCK_SECONDS
from pseudoreal_operator.lifecycle.recovery import REMEDIES, Kind, start_again
from pseudoreal_operator.observe.report_store import QUIET_SECONDS
from pseudoreal_trainer.runtime.ranks import LAST_SECONDS
from pseudoreal_trainer.runtime.rendezvous.identity import RESTART_SECONDS, SPARE_RESTART_SECONDS


def test_operator_decides_while_the_pods_still_wait() -> None:
    """A pod where a fault began ends LAST_SECONDS after it; the others say by their next report that they wait, and
    hear by the one after it who has the place."""
    assert LAST_SECONDS < STOP_SECONDS < ORIGIN_SECONDS < STUCK_SECONDS
    assert max(ORIGIN_SECONDS, STUCK_SECONDS) + REPORT_SECONDS <= SPARE_SECONDS
    assert SPARE_SECONDS + 2 * REPORT_SECONDS <= RESTART_SECONDS < SPARE_RESTART_SECONDS
    assert 3 * REPORT_SECONDS < QUIET_SECONDS, "two lost reports make no pod silent"


def test_each_trouble_has_means_and_new_pods_come_last() -> None:
    assert set(REMEDIES) == set(Kind)
    assert all(means and start_again not in means[:-1] for means in REMEDIES.values())
