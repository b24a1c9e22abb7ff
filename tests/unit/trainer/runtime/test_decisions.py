"""Number of restarts in place, and the termination message after the last."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.wire.messages import InPlace
from pseudoreal_api.wire.reports import Membership, Takeover
from pseudoreal_trainer.runtime import in_place
from pseudoreal_trainer.runtime.in_place import run_in_place
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import Launch, RanksResult
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity
from pseudoreal_trainer.runtime.stop import Stop
from pseudoreal_trainer.runtime.termination import termination_message

Starts = list[int]


@pytest.fixture
def launch(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    # The real constructor would install signal handlers in the test process.
    monkeypatch.setattr(Stop, "__init__", lambda stop: setattr(stop, "asked", False))
    folder = PodFolder(tmp_path)
    return Launch(config(0).model_copy(update={"in_place": 2}), tmp_path / "config", "worker", folder, Stop())


def dies(launch: Launch, text: str, *, may_restart: bool = True) -> RanksResult:
    return RanksResult(termination_message("Failed", launch.config, text), may_restart)


def play(monkeypatch: pytest.MonkeyPatch, *endings: RanksResult | None) -> Starts:
    """Let successive starts end in these ways; return the list of starts."""
    starts: Starts = []

    def run(_: Launch, place: RendezvousIdentity) -> RanksResult | None:
        starts.append(place.restart)
        return endings[len(starts) - 1]

    monkeypatch.setattr(in_place, "run_ranks", run)
    return starts


def test_ranks_that_ended_without_a_death_are_not_restarted_in_place(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = play(monkeypatch, dies(launch, "the loss is nan", may_restart=False))
    message = run_in_place(launch)
    assert (starts, message.message, message.in_place) == ([0], "the loss is nan", None)
    assert launch.folder.in_place() is None


def test_a_pod_ends_when_its_restarts_in_place_are_used_up(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = play(monkeypatch, *(dies(launch, text) for text in ("first", "second", "third")))
    message = run_in_place(launch)
    assert (starts, message.message) == ([0, 1, 2], "third")
    assert message.in_place == InPlace(restarts=2, peer_lost=False, message="second")
    assert launch.folder.in_place() == message.in_place


def test_a_pod_ends_if_the_other_pods_do_not_come_to_the_rendezvous_of_a_restart(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod ends with the message from before the restart."""
    starts = play(monkeypatch, dies(launch, "first"), dies(launch, "second"), None)
    message = run_in_place(launch)
    assert (starts, message.message) == ([0, 1, 2], "second")
    assert message.in_place == InPlace(restarts=1, peer_lost=False, message="first")


def test_a_pod_without_restarts_in_place_ends_at_the_first_death(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = play(monkeypatch, dies(launch, "first"))
    message = run_in_place(
        Launch(launch.config.model_copy(update={"in_place": 0}), launch.file, "worker", launch.folder, launch.stop)
    )
    assert (starts, message.message, message.in_place) == ([0], "first", None)


@pytest.mark.parametrize("index", [0, 2])
def test_a_pod_counts_as_yet_to_meet_until_it_has_had_ranks(
    index: int, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a takeover, a queue has admitted new pods: pod 2, a spare pod at first, has the place of pod 1."""
    monkeypatch.setenv("PET_NODE_RANK", str(index))
    config = launch.config.model_copy(update={"workers": 2, "spares": 1, "in_place": 2})
    launch = replace(launch, config=config)
    taken = Takeover(worker=1, pod=2)
    launch.folder.write_membership(Membership(restart=2, own_restarts=1, takeovers=[taken]))
    starts: list[tuple[int, bool]] = []
    begun: list[InPlace | None] = []

    def run(_: Launch, identity: RendezvousIdentity) -> RanksResult | None:
        starts.append((identity.restart, identity.is_first))
        begun.append(launch.folder.in_place())
        return None if identity.restart == 0 else dies(launch, "killed")

    monkeypatch.setattr(in_place, "run_ranks", run)
    monkeypatch.setattr(in_place, "prepare_torchrun", lambda: None)
    run_in_place(launch)
    assert starts[-2:] == [(2, True), (3, False)]
    assert starts[:-2] == ([(0, True)] if index == 0 else [])
    assert begun[-2] == InPlace(restarts=2, peer_lost=False, message=f"began as worker {min(index, 1)}")


@pytest.mark.parametrize(
    ("asked", "why"),
    [(True, "it was asked to stop before its ranks started"), (False, "another pod has its place")],
)
def test_a_pod_that_ends_without_ranks_says_why(
    asked: bool, why: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, None)
    launch.stop.asked = asked
    taken = Takeover(worker=0, pod=2)
    launch.folder.write_membership(Membership(restart=2, own_restarts=1, takeovers=[taken]))
    message = run_in_place(launch)
    assert (message.outcome, message.message) == ("Yielded", why)


def test_the_reason_of_a_restart_in_place_is_cut_to_the_length_of_its_field(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, dies(launch, "x" * 2000), None)
    run_in_place(launch)
    found = launch.folder.in_place()
    assert found is not None
    assert found.message == "x" * 300
