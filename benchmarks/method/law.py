"""The worth of a repeated block: the law of arXiv 2604.21106, fitted to the arms that share throughout. Pure.

L = E + A (r^φ N)^-α + B D^-β, with N parameters of the layers' distinct blocks, each used r times, and D tokens. The
law's N_once, parameters that are used once, is zero here: the embedding is left out, as in the plan's sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.method import arms, costs
from benchmarks.method.analysis import Trial

PUBLISHED = 0.46
"""φ of arXiv 2604.21106."""
_Array = npt.NDArray[np.float64]

_EXPONENTS = (0.02, 2.0)
"""Bounds of α and β."""
_WORTH = (-0.5, 1.5)
"""Bounds of φ. 0: a repeated block is worth one block; 1: as much as blocks of its own."""
_GRID, _ZOOMS, _SHRINK = 9, 20, 0.65
_RIDGE = 1e-12
"""Keeps the linear equations solvable where α or β is so small that its term is almost constant."""
_RESAMPLES = 100
_NORM = (1e5, 1e6)
"""Parameters and tokens of which the law's terms are taken relatively, so that E, A and B have similar sizes."""


@dataclass(frozen=True)
class Point:
    width: int
    seed: int
    parameters: float
    """Parameters of the distinct blocks."""
    uses: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Law:
    irreducible: float
    """E, nats per token."""
    capacity: float
    """A, of 100,000 parameters."""
    alpha: float
    data: float
    """B, of 1,000,000 tokens."""
    beta: float
    phi: float

    def loss(self, parameters: float, uses: float, tokens: float) -> float:
        return self.limit(parameters, uses) + self.data * float((tokens / _NORM[1]) ** -self.beta)

    def limit(self, parameters: float, uses: float) -> float:
        """Return the loss with unlimited tokens."""
        return self.irreducible + self.capacity * float((uses**self.phi * parameters / _NORM[0]) ** -self.alpha)

    @property
    def is_at_bound(self) -> bool:
        """True if φ is at the edge of what was searched."""
        return min(self.phi - _WORTH[0], _WORTH[1] - self.phi) < 1e-3


@dataclass(frozen=True)
class Fit:
    law: Law
    low: float | None
    """Lower end of φ's 95 % interval, by resampling seeds; None with one seed."""
    high: float | None
    points: int
    residual: float
    """Root mean square error over the means of the seeds, nats."""


def points_of(trials: Sequence[Trial]) -> list[Point]:
    """Return the points of the dense arms that have one stage with all layers: 1, 4 and 12 blocks."""
    found = []
    for trial in trials:
        stage = trial.arm.stages[0]
        if trial.study == "dense" and trial.kind in ("unshared", "shared throughout"):
            uses = stage.layers / stage.blocks
            size = arms.parameters("dense", trial.width) / uses
            found += [
                Point(trial.width, seed, size, uses, tokens, loss)
                for seed, curve in trial.curves.items()
                for tokens, loss in zip(curve.tokens, curve.losses, strict=True)
            ]
    return found


def fitted(points: Sequence[Point], resamples: int = _RESAMPLES) -> Fit | str:
    """Return the fit, or a sentence that says why there is none."""
    if reason := _degenerate(points):
        return reason
    law, residual = _fit(_means(points))
    low, high = _interval(points, resamples)
    return Fit(law, low, high, len(_means(points)), residual)


def _degenerate(points: Sequence[Point]) -> str | None:
    uses, sizes = {p.uses for p in points}, {p.parameters for p in points if p.uses == 1}
    budgets = {p.tokens for p in points}
    if len(uses) < 2:
        return "φ is not fitted: it needs unshared training and an arm that shares throughout."
    if len(sizes) < 2:
        return (
            "φ is not fitted: with unshared training of one size, φ and α cannot be told apart, because one block fewer"
            " and one use more change the law's second term alike."
        )
    if len(budgets) < 2:
        return "φ is not fitted: all trainings have the same number of tokens."
    if len({(p.parameters, p.uses, p.tokens) for p in points}) < 7:
        return "φ is not fitted: the law has 6 constants, and there are not 7 different trainings."
    return None


_Means = Mapping[tuple[float, float, float], float]


def _means(points: Sequence[Point]) -> _Means:
    """Return (parameters, uses, tokens) -> loss, the mean over seeds."""
    groups: dict[tuple[float, float, float], list[float]] = {}
    for p in points:
        groups.setdefault((p.parameters, p.uses, p.tokens), []).append(p.loss)
    return {key: sum(losses) / len(losses) for key, losses in groups.items()}


def _fit(means: _Means) -> tuple[Law, float]:
    """Return the law with the least squared error, and the root of its mean.

    α and β are searched over their logarithms, φ over itself, all within bounds, on a grid that closes in on the best
    point; E, A and B, which must not be negative, follow by linear least squares.
    """
    keys, losses = np.array([*means]), np.array([*means.values()])
    lower, upper = np.array([*np.log([_EXPONENTS, _EXPONENTS]), _WORTH]).T
    centre, span = (lower + upper) / 2, upper - lower
    best: tuple[float, _Array, _Array] = (np.inf, centre, np.zeros(3))
    for _ in range(_ZOOMS):
        axes = [
            np.linspace(max(lo, c - s / 2), min(hi, c + s / 2), _GRID)
            for lo, hi, c, s in zip(lower, upper, centre, span, strict=True)
        ]
        candidates = np.array([*product(*axes)])
        errors, coefficients = _linear(keys, losses, candidates)
        index = int(errors.argmin())
        if errors[index] < best[0]:
            best = (float(errors[index]), candidates[index], coefficients[index])
        centre, span = best[1], span * _SHRINK
    error, (log_alpha, log_beta, phi), (e, a, b) = best
    law = Law(float(e), float(a), float(np.exp(log_alpha)), float(b), float(np.exp(log_beta)), float(phi))
    return law, float(np.sqrt(error / len(losses)))


def _linear(keys: _Array, losses: _Array, candidates: _Array) -> tuple[_Array, _Array]:
    """Return squared errors [C] and coefficients E, A, B [C, 3] of the exponents in `candidates` [C, 3]."""
    alpha, beta, phi = np.exp(candidates[:, :1]), np.exp(candidates[:, 1:2]), candidates[:, 2:]
    size, uses, tokens = keys[:, 0] / _NORM[0], keys[:, 1], keys[:, 2] / _NORM[1]
    terms = [np.ones((len(candidates), len(keys))), (uses**phi * size) ** -alpha, tokens**-beta]
    best_error, best = np.full(len(candidates), np.inf), np.zeros((len(candidates), 3))
    # E is zero where its best value is negative. Exponents whose A or B would be negative are no candidates.
    for kept in ((0, 1, 2), (1, 2)):
        matrix = np.stack([terms[i] for i in kept], axis=-1)
        gram = np.einsum("cnk,cnl->ckl", matrix, matrix) + _RIDGE * np.eye(len(kept))
        solved = np.linalg.solve(gram, np.einsum("cnk,n->ck", matrix, losses)[:, :, None])[:, :, 0]
        error = ((np.einsum("cnk,ck->cn", matrix, solved) - losses) ** 2).sum(axis=1)
        is_better = (solved >= 0).all(axis=1) & (error < best_error)
        best_error = np.where(is_better, error, best_error)
        whole = np.zeros_like(best)
        whole[:, kept] = solved
        best = np.where(is_better[:, None], whole, best)
    return best_error, best


def _interval(points: Sequence[Point], resamples: int) -> tuple[float | None, float | None]:
    """Return the 2.5 and 97.5 percentiles of φ over draws of the seeds with replacement, at each width the same seeds
    for all arms."""
    groups: dict[int, dict[int, list[Point]]] = {}
    for p in points:
        groups.setdefault(p.width, {}).setdefault(p.seed, []).append(p)
    if all(len(seeds) < 2 for seeds in groups.values()):
        return None, None
    chance = Random(0)
    found: list[float] = []
    for _ in range(resamples):
        drawn = [chance.choices([*seeds.values()], k=len(seeds)) for seeds in groups.values()]
        sample = [p for width in drawn for seed in width for p in seed]
        # A draw may leave out the only seed of an arm.
        if _degenerate(sample) is None:
            found.append(_fit(_means(sample))[0].phi)
    if not found:
        return None, None
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def best_moment(law: Law, parameters: float, uses: float, tokens: float, ratio: float) -> float:
    """Return the moment of the delink with the highest speed-up by the law, as a fraction of the full budget. Arguments
    as in `speed_up_at`."""
    moments = (percent / 100 for percent in range(100))
    return max(moments, key=lambda moment: speed_up_at(law, moment, parameters, uses, tokens, ratio))


def speed_up_at(law: Law, moment: float, parameters: float, uses: float, tokens: float, ratio: float) -> float:
    """Return the speed-up in seconds to the final loss of unshared training, by the law, of one block that is delinked
    at this fraction of the full budget.

    By the law, a delinked model with the loss L goes on as an unshared model that has reached L does: the tokens of
    the pseudo phase count as the tokens after which unshared training has their loss. `parameters`: of the layers
    unshared; `ratio`: see `costs.by_seconds`.
    """
    if moment == 0:
        return 1.0
    loss = law.loss(parameters / uses, uses, moment * tokens)
    above = loss - law.limit(parameters, 1)
    worth = _NORM[1] * (above / law.data) ** (-1 / law.beta) if above > 0 else np.inf
    return float(tokens / (moment * tokens * max(1 / ratio, 1 / uses) + max(0.0, tokens - worth)))


def moments(trials: Sequence[Trial], ratio: float) -> dict[float, float]:
    """Return the measured speed-ups in seconds of one block, by the moment of its delink; 0 is unshared training."""
    found = {0.0: 1.0}
    for trial in trials:
        stage = trial.arm.stages[0]
        if trial.kind == "delinked" and len(trial.arm.stages) == 2 and stage.blocks == 1:
            speed_up = trial.speed_up(costs.by_seconds(ratio))
            if speed_up is not None:
                found[stage.until] = speed_up.mean
    return found
