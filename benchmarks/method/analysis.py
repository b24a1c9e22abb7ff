"""The registered comparison of docs/method-plan.md: arms against unshared training, paired by seed. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import isfinite
from statistics import median
from typing import Literal

from benchmarks.method import costs
from benchmarks.method.arms import (
    BASES,
    BUDGETS,
    OTHER_SEEDS,
    REGISTERED,
    Arm,
    Scale,
    Size,
    Study,
    named,
    parameters,
)
from benchmarks.method.costs import Price, Share, Spending
from benchmarks.method.curves import Curve, Meeting, difference_at_equal_cost, mean_curve, meeting
from benchmarks.method.intervals import Estimate, estimate
from benchmarks.method.results import Result, Role
from benchmarks.method.schedule import rate_of, seeds_of

LEVEL = 0.01
"""Nats. An open result with a smaller difference of the losses is called level."""
FAR = 1.0
"""Nats above the median loss that are named as a limit of the page."""
RATIOS = tuple(20 ** (i / 60) for i in range(61))
"""Cost ratios at which seconds are compared, from 1 to 20."""

Kind = Literal["unshared", "delinked", "shared throughout", "grown", "upcycled", "small"]
Verdict = Literal["yes", "no", "level", "open"]


def kind_of(arm: Arm) -> Kind:
    first, last = arm.stages[0], arm.stages[-1]
    if arm.width:
        return "small"
    if last.blocks < last.layers:
        return "shared throughout"
    if first.blocks < first.layers:
        return "delinked"
    if first.layers < last.layers:
        return "grown"
    return "upcycled" if first.experts != last.experts else "unshared"


CONTROLS: tuple[Kind, ...] = ("shared throughout", "grown")
"""Kinds of controls that an arm has to beat for a yes in seconds. Below these or a small model it is a no."""


@dataclass(frozen=True, eq=False)
class Trial:
    """An arm at one width, with the curves of its seeds, and of unshared training with the same seeds."""

    study: Study
    width: int
    arm: Arm
    curves: dict[int, Curve]
    unshared: dict[int, Curve]
    peak_bytes: float
    """Median growth of resident memory in the decays."""
    relative_rate: float | None = None
    """Peak learning rate of the arm ÷ peak learning rate of unshared training; None while one is not chosen."""
    scale: Scale = REGISTERED

    @property
    def kind(self) -> Kind:
        return kind_of(self.arm)

    @property
    def parameters(self) -> int:
        return parameters(self.study, self.width)

    @cached_property
    def shares(self) -> list[Share]:
        return costs.shares(self.study, self.width, self.arm, self.scale)

    @cached_property
    def paired(self) -> list[tuple[Curve, Curve]]:
        """Curves of the arm and of unshared training, for each seed that both have."""
        return [(self.curves[seed], self.unshared[seed]) for seed in sorted(self.curves.keys() & self.unshared.keys())]

    @cached_property
    def meetings(self) -> list[Meeting]:
        return [meeting(arm, unshared) for arm, unshared in self.paired]

    @property
    def mean_curve(self) -> Curve:
        return mean_curve([*self.curves.values()])

    def loss(self) -> Estimate:
        return estimate([curve.final for curve in self.curves.values()])

    def difference(self) -> Estimate | None:
        """Return the arm's final loss minus that of unshared training, at equal tokens; None without pairs."""
        return estimate([arm.final - unshared.final for arm, unshared in self.paired]) if self.paired else None

    @property
    def ends_above(self) -> bool:
        """Whether the arm ends above the final loss of unshared training, as the mean over pairs."""
        difference = self.difference()
        return difference is not None and difference.mean > 0

    def difference_at_equal(self, price: Price) -> Estimate | None:
        """Return the difference of the losses at equal cost; None without pairs, or if unshared training has a smallest
        budget that costs more."""
        found = [difference_at_equal_cost(arm, unshared, self._spending(price)) for arm, unshared in self.paired]
        values = [value for value in found if value is not None]
        return estimate(values) if values and len(values) == len(found) else None

    def speed_up(self, price: Price = costs.by_tokens) -> Estimate | None:
        """Return the primary endpoint: the speed-up to the final loss of unshared training, or, for a seed that ends
        above it, to the seed's own final loss. None without pairs."""
        if not self.meetings:
            return None
        spending, bounds = self._spending(price), {one.bound for one in self.meetings}
        values, ends_above = [one.speed_up(spending) for one in self.meetings], self.ends_above
        return estimate(values, at_most="at most" in bounds, at_least="at least" in bounds, ends_above=ends_above)

    def speed_up_in_seconds(self, ratio: float) -> Estimate | None:
        """Return the speed-up where a step of unshared training takes `ratio` times as long as its computing; None
        without pairs."""
        return self.speed_up(costs.by_seconds(ratio))

    def _spending(self, price: Price) -> Spending:
        return costs.spending(self.shares, price)


def trials(results: Sequence[Result], role: Role = "compared", scale: Scale = REGISTERED) -> list[Trial]:
    """Return what has been trained, in the order of the plan: sizes of each study, then arms.

    A curve counts if it has the full budget and a finite loss there.
    """
    found = []
    for study, sizes in scale.sizes.items():
        for size in sizes:
            of_arm = {arm.name: _rows(study, size.width, arm, results, role, scale) for arm in scale.arms[study]}
            unshared = _curves(of_arm[costs.unshared(study).name])
            for arm in scale.arms[study]:
                if curves := _curves(rows := of_arm[arm.name]):
                    peak = median(r.peak_bytes for r in rows)
                    rate = _relative_rate(study, arm, results, scale)
                    found.append(Trial(study, size.width, arm, curves, unshared, peak, rate, scale))
    return found


@dataclass(frozen=True)
class Remedy:
    """An arm that changes a base in one respect, or is tried in its place."""

    trial: Trial
    base: Trial

    def gain(self) -> Estimate | None:
        """Return the final loss minus the base's, paired by seed; None without pairs."""
        seeds = sorted(self.trial.curves.keys() & self.base.curves.keys())
        return (
            estimate([self.trial.curves[one].final - self.base.curves[one].final for one in seeds]) if seeds else None
        )


def remedies(results: Sequence[Result], scale: Scale = REGISTERED) -> list[Remedy]:
    """Return the remedies that are trained, in the order of the plan."""
    found = []
    for study, known in scale.remedies.items():
        own = (costs.unshared(study), named(study, BASES[study]), *known)
        size = Size(scale.tuned_width, OTHER_SEEDS, all_arms=True)
        tried = trials(results, scale=replace(scale, arms={study: own}, sizes={study: (size,)}))
        base = next((trial for trial in tried if trial.arm.name == BASES[study]), None)
        found += [Remedy(trial, base) for trial in tried if base is not None and trial.arm in known]
    return found


def _rows(study: Study, width: int, arm: Arm, results: Sequence[Result], role: Role, scale: Scale) -> list[Result]:
    """Return an arm's rows at its chosen rate; at each rate where the choice has not ended, or was another trial's."""
    own = [r for r in results if (r.study, r.role, r.width, r.arm) == (study, role, width, arm.name)]
    chosen = rate_of(study, arm.tuned_as, results, scale)
    return [r for r in own if r.rate == chosen] or own


def _relative_rate(study: Study, arm: Arm, results: Sequence[Result], scale: Scale) -> float | None:
    own, reference = (rate_of(study, one.tuned_as, results, scale) for one in (arm, costs.unshared(study)))
    return None if own is None or reference is None else own / reference


def _curves(rows: Sequence[Result]) -> dict[int, Curve]:
    """Return seed -> curve."""
    found = {}
    for seed, own in groupby(sorted(rows, key=lambda r: (r.seed, r.tokens)), key=lambda r: r.seed):
        points = {r.budget: r for r in own if isfinite(r.loss)}
        if max(BUDGETS) in points:
            found[seed] = Curve(tuple(r.tokens for r in points.values()), tuple(r.loss for r in points.values()))
    return found


def diverged(results: Sequence[Result], role: Role = "compared") -> list[Result]:
    return [r for r in results if r.role == role and not isfinite(r.loss)]


def far_above(results: Sequence[Result], role: Role = "compared") -> list[Result]:
    """Return results more than `FAR` above the median of their study, width and budget: trainings that did not diverge,
    but lost what they had learnt. They count."""
    groups: defaultdict[tuple[Study, int, float], list[Result]] = defaultdict(list)
    for r in results:
        if r.role == role and isfinite(r.loss):
            groups[r.study, r.width, r.budget].append(r)
    return [r for own in groups.values() for r in own if r.loss > median(one.loss for one in own) + FAR]


@dataclass(frozen=True)
class Comparison:
    """The trials of one study and width; only those with pairs."""

    study: Study
    width: int
    trials: tuple[Trial, ...]

    @property
    def scale(self) -> Scale:
        return self.trials[0].scale

    def of_kind(self, *kinds: Kind) -> list[Trial]:
        return [trial for trial in self.trials if trial.kind in kinds]

    @property
    def parameters(self) -> int:
        return parameters(self.study, self.width)

    @property
    def tokens(self) -> int:
        """Tokens of the full budget."""
        return max(curve.full for curve in self.trials[0].curves.values())

    @property
    def missing_controls(self) -> list[str]:
        """Names of the controls of the plan that are not trained."""
        trained = {trial.arm.name for trial in self.trials}
        return [arm.name for arm in self.scale.arms[self.study] if kind_of(arm) in CONTROLS and arm.name not in trained]

    @property
    def lacking(self) -> dict[str, tuple[int, int]]:
        """Arms with fewer pairs than the plan has seeds at this size -> pairs, seeds of the plan."""
        size = next(size for size in self.scale.sizes[self.study] if size.width == self.width)
        pairs = {trial.arm.name: len(trial.paired) for trial in self.trials}
        found = {}
        for arm in self.scale.arms[self.study]:
            have, wanted = pairs.get(arm.name, 0), seeds_of(arm, size)
            if arm is not costs.unshared(self.study) and have < wanted:
                found[arm.name] = (have, wanted)
        return found

    @property
    def is_complete(self) -> bool:
        """True if all arms that carry the conclusion have the seeds of the plan."""
        lacking = self.lacking
        return not any(arm.is_primary and arm.name in lacking for arm in self.scale.arms[self.study])

    def per_token(self, trial: Trial) -> Verdict:
        """Return the plan's verdict on the speed-up in tokens."""
        found = trial.speed_up()
        assert found is not None, "trials of a comparison have pairs"
        if found.low is not None and found.low > 1 and not found.at_most:
            return "yes"
        if found.high is not None and found.high < 1 and not found.at_least:
            return "no"
        difference = trial.difference()
        assert difference is not None, "trials of a comparison have pairs"
        return "level" if difference.low is not None and abs(difference.mean) < LEVEL else "open"

    def in_seconds(self, trial: Trial, ratio: float) -> Verdict:
        """Return the plan's verdict on the speed-up in seconds at a cost ratio.

        An arm that is itself a control is held against the others. Without a trained arm of each kind of control
        there is no yes. A value that is only a bound decides where it can: a control that has at most some speed-up
        makes no arm a no, and an arm that has at most some speed-up is no yes.
        """
        found = trial.speed_up_in_seconds(ratio)
        assert found is not None, "trials of a comparison have pairs"
        rivals = self._rivals(trial, ratio, *CONTROLS)
        known = [rival.mean for rival in (*rivals, *self._rivals(trial, ratio, "small")) if not rival.at_most]
        surpassed = max([1.0, *known])
        if found.high is not None and found.high < surpassed and not found.at_least:
            return "no"
        has_all = all(self.of_kind(kind) for kind in CONTROLS if kind != trial.kind)
        is_bounded = found.at_most or any(rival.at_least for rival in rivals)
        if found.low is not None and found.low > max([1.0, *(rival.mean for rival in rivals)]) and has_all:
            return "open" if is_bounded else "yes"
        return "open"

    def _rivals(self, trial: Trial, ratio: float, *kinds: Kind) -> list[Estimate]:
        """Return the speed-ups in seconds of the other arms of these kinds."""
        others = [other for other in self.of_kind(*kinds) if other is not trial]
        return [speed for other in others if (speed := other.speed_up_in_seconds(ratio))]


def comparisons(found: Sequence[Trial]) -> list[Comparison]:
    """Return a comparison for each study and width at which an arm has pairs with unshared training."""
    by_size: defaultdict[tuple[Study, int], list[Trial]] = defaultdict(list)
    for trial in found:
        if trial.paired and trial.kind != "unshared":
            by_size[trial.study, trial.width].append(trial)
    return [Comparison(study, width, tuple(own)) for (study, width), own in by_size.items()]


def leading(compared: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparison of each study from which the page answers: the largest complete size that has all arms, or
    the first such size while none is complete."""
    found = []
    for study, sizes in (compared[0].scale if compared else REGISTERED).sizes.items():
        own = {one.width: one for one in compared if one.study == study}
        whole = [own[size.width] for size in sizes if size.all_arms and size.width in own]
        if whole:
            found.append(max((one for one in whole if one.is_complete), key=lambda one: one.width, default=whole[0]))
    return found


def ranges(found: Sequence[tuple[float, str]], wanted: str) -> list[tuple[float, float]]:
    """Return the first and last ratio of each run of neighbouring cost ratios whose label is `wanted`. `found`:
    ascending ratios with their labels, verdicts or names of arms."""
    spans = []
    for value, group in groupby(found, key=lambda one: one[1]):
        own = [ratio for ratio, _ in group]
        if value == wanted:
            spans.append((own[0], own[-1]))
    return spans
