"""Train the links of all planned runs, and write the losses of their decays.

Training continues where it ended: the scratch folder has the trained links, and a CSV file has every result.
"""

import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from benchmarks.method.chain import Link
from benchmarks.method.results import Result, read_results, write_results
from benchmarks.method.schedule import Plan, Planned, is_known, real_steps, unfinished
from benchmarks.method.training import Place, Trained, train


@dataclass(frozen=True)
class Trials:
    """Runs, the machine that trains them, and the file of their results."""

    plan: Plan
    place: Place
    results: Path
    commit: str
    at_a_time: int = 1
    """Links that train side by side."""
    expected: Plan | None = None
    """Runs that the time left is estimated from; None: those of `plan`, of which some may wait for a rate."""
    keeps_links: bool = True
    """False: a link is deleted once no run without a result needs it."""


@dataclass
class _Pace:
    """Speed of the links trained so far, start and validation included."""

    seconds: float = 0.0
    steps: float = 0.0
    """In steps of the real phase."""

    def hours(self, links: Mapping[str, Link], at_a_time: int) -> float:
        return sum(map(real_steps, links.values())) * self.seconds / max(1.0, self.steps) / at_a_time / 3600


def train_all(trials: Trials) -> list[Result]:
    """Train what the plan asks for and is not trained yet; return all results."""
    results, pace = read_results(trials.results), _Pace()
    running: dict[Future[float], Link] = {}
    with ThreadPoolExecutor(trials.at_a_time) as pool:
        while True:
            busy = {link.key for link in running.values()}
            results = _collect(trials, results, busy)
            for link in _waiting(trials, results, busy):
                if len(running) == trials.at_a_time:
                    break
                if link.key not in busy:
                    busy.add(link.key)
                    running[pool.submit(_timed, link, trials.place)] = link
            if not running:
                return results
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                link = running.pop(done)
                pace.seconds, pace.steps = pace.seconds + done.result(), pace.steps + real_steps(link)
                left = {key: other for key, other in _untrained(trials, results).items() if key != link.key}
                progress.note(
                    f"{link.run.label}, steps {link.begin:,} to {link.end:,}: {done.result():.0f} s;"
                    f" about {len(left)} trainings left, {pace.hours(left, trials.at_a_time):.2g} h"
                )


def _timed(link: Link, place: Place) -> float:
    """Train the link; return its seconds."""
    begin = time.monotonic()
    train(link, place)
    return time.monotonic() - begin


def _collect(trials: Trials, results: Sequence[Result], busy: Collection[str]) -> list[Result]:
    """Return the results with those of decays trained since, and write them. `busy`: keys of links in training, whose
    folders their processes still use."""
    found = [*results]
    for one in trials.plan(results):
        for budget, decay in one.decays():
            if decay.key in busy or is_known(one, budget, results):
                continue
            if (trained := trials.place.known(decay)) is not None:
                found.append(_result(one, budget, decay, trained, trials.commit))
                progress.note(f"{one.role} {one.run.label}, {budget:.0%}: {found[-1].loss:.4f}")
    if len(found) == len(results):
        return found
    write_results(found, trials.results)
    if not trials.keeps_links:
        _delete_links(trials, results, found)
    return _collect(trials, found, busy)


def _delete_links(trials: Trials, before: Sequence[Result], now: Sequence[Result]) -> None:
    """Delete the links that runs needed before, and need no longer."""
    needed = unfinished(trials.plan(now), now)
    for key, link in unfinished(trials.plan(before), before).items():
        if key not in needed:
            shutil.rmtree(trials.place.folder(link), ignore_errors=True)


def _waiting(trials: Trials, results: Sequence[Result], busy: Collection[str]) -> Iterator[Link]:
    """Yield the first link of each run that is not trained yet, or is in training, in the order of the runs."""
    for one in trials.plan(results):
        needed = unfinished([one], results)
        yield from islice((x for key, x in needed.items() if key in busy or trials.place.known(x) is None), 1)


def _untrained(trials: Trials, results: Sequence[Result]) -> dict[str, Link]:
    """Return key -> link, also of links that are being trained."""
    links = unfinished((trials.expected or trials.plan)(results), results)
    return {key: link for key, link in links.items() if trials.place.known(link) is None}


def _result(one: Planned, budget: float, decay: Link, trained: Trained, trained_by: str) -> Result:
    assert trained.loss is not None, "a decay has a loss"
    return Result(
        study=one.run.study,
        role=one.role,
        width=one.run.width,
        arm=one.run.arm.name,
        seed=one.run.seed,
        rate=one.run.rate,
        budget=budget * one.run.fraction,
        steps=decay.end,
        tokens=decay.end * one.run.scale.tokens_of_a_step,
        loss=trained.loss,
        validation_tokens=trained.validation_tokens,
        seconds_per_step=trained.seconds_per_step,
        peak_bytes=trained.peak_bytes,
        date=datetime.now(UTC).date().isoformat(),
        commit=trained_by,
        device=trained.device,
    )
