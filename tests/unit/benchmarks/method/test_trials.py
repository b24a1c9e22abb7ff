"""The links of planned runs are trained in order, once, and go on after an interruption. No link trains here."""

import csv
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import isnan, nan
from pathlib import Path

import pytest
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.storage.durable import write_atomically

from benchmarks.method import training, trials
from benchmarks.method.arms import ARMS, REGISTERED, Size
from benchmarks.method.chain import Link, Run, decays
from benchmarks.method.results import read_results
from benchmarks.method.schedule import planned, unfinished
from benchmarks.method.training import Place, Trained, train
from benchmarks.method.trials import Trials, train_all
from tests.unit.trainer.data.support.written import write_native

_SCALE = replace(
    REGISTERED,
    arms={"dense": tuple(arm for arm in ARMS["dense"] if arm.tuned_as == "delinked at 30 %")},
    sizes={"dense": (Size(16, seeds=2, all_arms=True),)},
)
"""Three arms with a common beginning."""


class _Trainer:
    """Writes records of links, without training; the loss is lowest at a rate of 16e-3."""

    def __init__(self, fails_after: int = 1000, diverges_above: float = 1.0) -> None:
        self.trained: list[str] = []
        self._fails_after, self._diverges_above, self._lock = fails_after, diverges_above, threading.Lock()

    def __call__(self, link: Link, place: Place) -> Trained:
        with self._lock:
            if len(self.trained) == self._fails_after:
                raise RuntimeError("the machine restarts")
            self.trained.append(link.key)
        assert link.parent is None or place.known(link.parent) is not None, "a parent is trained before its child"
        loss = None if link.decay_from is None else 3 + abs(link.run.rate - 16e-3)
        if loss is not None and link.run.rate > self._diverges_above:
            loss = nan
        record = Trained(steps=1, seconds_per_step=0.1, peak_bytes=1, loss=loss, validation_tokens=5)
        place.folder(link).mkdir(parents=True)
        write_atomically(place.folder(link) / "trained.json", record.model_dump_json())
        return record


def _trials(folder: Path, **changes: object) -> Trials:
    place = Place(folder / "scratch", folder / "texts")
    found = Trials(partial(planned, scale=_SCALE), place, folder / "results.csv", "abc", at_a_time=2)
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> _Trainer:
    found = _Trainer()
    monkeypatch.setattr(trials, "train", found)
    return found


def test_every_link_is_trained_once_and_every_decay_has_a_result(trainer: _Trainer, tmp_path: Path) -> None:
    results = train_all(_trials(tmp_path))
    assert len(trainer.trained) == len({*trainer.trained})
    assert {*trainer.trained} >= {*unfinished(planned(results, _SCALE), [])}
    # Four rates at half the budget and two at the full one; then three arms, two seeds and three budgets, at the best
    # rate.
    tuning = sorted((r.budget, r.rate) for r in results if r.role == "tuning")
    assert tuning == [(0.5, 4e-3), (0.5, 8e-3), (0.5, 16e-3), (0.5, 32e-3), (1.0, 8e-3), (1.0, 16e-3)]
    assert {r.rate for r in results if r.role == "compared"} == {16e-3}
    assert sum(r.role == "compared" for r in results) == 3 * 2 * 3
    assert _without_order(read_results(tmp_path / "results.csv")) == _without_order(results)


def _without_order(results: Sequence[object]) -> list[str]:
    return sorted(map(repr, results))


def test_trials_go_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = _Trainer(fails_after=13), _Trainer(), _Trainer()
    monkeypatch.setattr(trials, "train", first)
    with pytest.raises(RuntimeError, match="the machine restarts"):
        train_all(_trials(tmp_path))
    monkeypatch.setattr(trials, "train", second)
    results = train_all(_trials(tmp_path))
    assert len(results) == 6 + 18
    assert not {*first.trained} & {*second.trained}
    monkeypatch.setattr(trials, "train", third)
    assert len(train_all(_trials(tmp_path))) == len(results)
    assert not third.trained


def test_links_are_deleted_once_no_run_needs_them(trainer: _Trainer, tmp_path: Path) -> None:
    results = train_all(_trials(tmp_path, keeps_links=False, at_a_time=1))
    assert len(results) == 6 + 18
    assert len(trainer.trained) == len({*trainer.trained})
    assert not [*(tmp_path / "scratch").rglob("trained.json")]


class _Lingering(_Trainer):
    """Its first decay ends only after three more links have begun since its record was written."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = threading.Condition()
        self.kept_its_folder: bool | None = None

    def __call__(self, link: Link, place: Place) -> Trained:
        record = super().__call__(link, place)
        with self._begun:
            self._begun.notify_all()
        if link.decay_from is not None and self.kept_its_folder is None:
            self.kept_its_folder = False
            later = len(self.trained) + 3
            with self._begun:
                assert self._begun.wait_for(lambda: len(self.trained) >= later, timeout=60)
            self.kept_its_folder = place.known(link) is not None
        return record


def test_the_folder_of_a_link_in_training_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _Lingering()
    monkeypatch.setattr(trials, "train", trainer)
    assert len(train_all(_trials(tmp_path, keeps_links=False))) == 6 + 18
    assert trainer.kept_its_folder


@pytest.mark.usefixtures("trainer")
def test_the_time_left_counts_runs_that_wait_for_their_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "note", lines.append)
    whole = unfinished(planned(train_all(_trials(tmp_path / "once")), _SCALE), [])
    lines.clear()
    train_all(_trials(tmp_path, expected=lambda results: planned(results, _SCALE), at_a_time=1))
    left = [int(line.split("about ")[1].split()[0]) for line in lines if "trainings left" in line]
    assert left[-1] == 0
    # After the choice of rates, each link takes one from the rest.
    assert left[-len(whole) :] == [*range(len(whole) - 1, -1, -1)]


def test_the_children_of_a_diverged_link_diverge_without_training(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path)
    decay = decays(Run("dense", ARMS["dense"][4], 16, 0, 8e-3, "kernel"))[0]
    first, *others = decay.ancestry()
    place.folder(first).mkdir(parents=True)
    record = Trained(steps=0, seconds_per_step=0.0, peak_bytes=0, has_diverged=True)
    (place.folder(first) / "trained.json").write_text(record.model_dump_json())
    found = [train(link, place) for link in others]
    assert all(one.has_diverged for one in found)
    assert [one.loss for one in found[:-1]] == [None] * (len(others) - 1)
    assert found[-1].loss is not None
    assert isnan(found[-1].loss)


def test_a_diverged_run_is_a_result_and_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "train", _Trainer(diverges_above=10e-3))
    results = train_all(_trials(tmp_path))
    tuning = {r.rate: r.loss for r in results if r.role == "tuning"}
    assert {*tuning} == {4e-3, 8e-3, 16e-3}
    assert isnan(tuning[16e-3])
    assert {r.rate for r in results if r.role == "compared"} == {8e-3}
    assert isnan(next(r.loss for r in read_results(tmp_path / "results.csv") if r.rate == 16e-3))


def test_a_decay_that_ends_between_two_looks_is_collected_later(
    trainer: _Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are collected first, then the waiting links are listed; meanwhile a training may end."""
    found = _trials(tmp_path)
    run = next(iter(planned([], _SCALE)))
    for link in unfinished([run], []).values():
        trainer(link, found.place)
    collect = trials._collect
    calls = iter(range(100))
    monkeypatch.setattr(trials, "_collect", lambda *given: [*given[1]] if next(calls) == 0 else collect(*given))
    assert len(train_all(found)) == 6 + 18


@pytest.mark.usefixtures("trainer")
def test_results_of_before_the_column_of_the_device_are_read(tmp_path: Path) -> None:
    train_all(_trials(tmp_path))
    file = tmp_path / "results.csv"
    rows = [*csv.DictReader(file.open(newline=""))]
    with file.open("w", newline="") as out:
        table = csv.DictWriter(out, [name for name in rows[0] if name != "device"], extrasaction="ignore")
        table.writeheader()
        table.writerows(islice(rows, 3))
    assert [r.device for r in read_results(file)] == ["cpu"] * 3


def test_windows_are_those_of_the_files_in_order(tmp_path: Path) -> None:
    write_native(tmp_path, [[*range(1, 8)]], [[*range(10, 14)]], vocabulary=70_000)
    # Tokens: 1..7, 0, 10..13, 0; each window has the first token of the next one as its last target.
    windows = [[1, 2, 3, 4, 5], [5, 6, 7, 0, 10], [10, 11, 12, 13, 0]]
    assert training.validation_windows(tmp_path, 4).tolist() == windows


def test_of_a_large_validation_text_windows_at_equal_distances_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_native(tmp_path, [[*range(1, 100)]])
    monkeypatch.setattr(training, "_MOST_TOKENS", 20)
    starts = [window[0] for window in training.validation_windows(tmp_path, 4).tolist()]
    assert starts == [1, 21, 41, 61, 81]
