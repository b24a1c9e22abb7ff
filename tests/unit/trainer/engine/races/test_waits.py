"""Every wait of the engine is accounted for: without it a race is found, or a sentence says why it is there."""

from pathlib import Path

import pytest
from pseudoreal_trainer.engine.gradients import UpdateThread

from tests.support.depth import DEPTH
from tests.unit.trainer.engine.races.support.accounted import FOUND, OTHERS
from tests.unit.trainer.engine.races.support.scenario import run
from tests.unit.trainer.engine.races.support.scenarios import SCENARIOS
from tests.unit.trainer.engine.races.support.sites import Site, sites

USUAL = {site: name for site, name in FOUND.items() if name in ("device", "host", "sharded gradients", "pipeline")}
"""Waits whose removal is tried in every run: about half of them, in few scenarios."""


def test_every_wait_is_accounted_for() -> None:
    assert not FOUND.keys() & OTHERS.keys()
    accounted = FOUND.keys() | OTHERS.keys()
    unknown, gone = sorted(sites().keys() - accounted), sorted(accounted - sites().keys())
    assert not unknown, f"name a scenario in which {unknown[0]} is needed, or the reason for it (support/accounted.py)"
    assert not gone, f"{gone[0]} is no wait of the engine any more (support/accounted.py)"


@pytest.mark.parametrize("site", DEPTH.of(USUAL, FOUND), ids=str)
def test_a_race_is_found_without_the_wait(site: Site, tmp_path: Path) -> None:
    outcome = run(SCENARIOS[FOUND[site]], tmp_path, removed=site)
    assert site in outcome.reached
    assert outcome.races


def test_a_race_is_found_if_an_update_does_not_wait_for_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the host wait for each other by futures, which are no waits of the list."""
    monkeypatch.setattr(UpdateThread, "_wait_for_capture", lambda *_: None)
    races = run(SCENARIOS["device"], tmp_path).races
    assert any("update" in str(race) and "snapshot.py" in str(race) for race in races)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("RunAheadLimit.pass_launched", "offloaded activations"),
        ("ReductionThread._finish_sum", "sharded gradients"),
        ("Trace.gpu_span", "trace"),
        ("WarmUp.run", "pipeline"),
    ],
)
def test_no_race_is_found_without_a_wait_of_the_device_that_orders_nothing(
    function: str, name: str, tmp_path: Path
) -> None:
    """Otherwise the sentence about the wait is wrong."""
    (site,) = (site for site in OTHERS if site.function == function)
    outcome = run(SCENARIOS[name], tmp_path, removed=site)
    assert site in outcome.reached
    assert not outcome.races
