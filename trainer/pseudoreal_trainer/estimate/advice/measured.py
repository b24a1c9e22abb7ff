"""Results of a trial's runs as evidence: each arm beside unshared training, paired by seed. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import mean

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.candidates import name_of
from pseudoreal_trainer.estimate.advice.evidence import Stage, Study, Trial
from pseudoreal_trainer.estimate.advice.intervals import interval

_MOST_SLOPES = 20
"""Largest difference of losses, in units of the slope, that is turned into tokens: e^20 times as many."""


@dataclass(frozen=True)
class Run:
    """A finished run of a trial."""

    name: str
    stages: tuple[Stage, ...]
    seed: int
    rate: str
    """Peak learning rate."""
    tokens: int
    loss: float
    """Final validation loss, nats per token."""


Losses = Mapping[int, float]
"""Seed -> final loss."""


def trials_of(runs: Iterable[Run], study: Study, width: int, parameters: int) -> list[Trial]:
    """Return a trial for each arm. With runs at several peak rates, an arm takes the rate with the lowest mean loss.

    The speed-up of an arm is exp(-d / s), seed by seed. d: its final loss minus the final loss of unshared training. s:
    the decrease of the loss of unshared training for e times as many tokens, between its two budgets. Raises
    InvalidJobError if runs are missing or do not fit together.
    """
    found = _by_arm(runs)
    unshared = {tokens: losses for (stages, tokens), losses in found.items() if _is_unshared(stages)}
    if len(unshared) < 2:
        raise InvalidJobError(
            "the runs have unshared training with one budget or none; the trial needs it with two, whose slope turns"
            " losses into tokens: give --from the runs of unshared and of unshared-half, too"
        )
    tokens = max(unshared)
    slope = _slope(unshared)
    trials = []
    for (stages, budget), losses in found.items():
        if _is_unshared(stages):
            continue
        if budget != tokens:
            raise InvalidJobError(
                f"the runs of {name_of(stages)} have {budget:,} tokens, and unshared training has {tokens:,}; runs"
                " are compared with the same tokens"
            )
        seeds = sorted(losses.keys() & unshared[tokens].keys())
        if not seeds:
            raise InvalidJobError(f"no run of {name_of(stages)} has the data.seed of a run of unshared training")
        differences = [losses[seed] - unshared[tokens][seed] for seed in seeds]
        if max(map(abs, differences)) > _MOST_SLOPES * slope:
            raise InvalidJobError(
                f"the final losses of {name_of(stages)} differ from unshared training by up to"
                f" {max(map(abs, differences)):.3g} nats, which no number of tokens makes up for at its"
                f" {slope:.3g} nats for e times as many; look for runs that diverged, or train longer (until)"
            )
        trials.append(
            Trial(
                study=study,
                width=width,
                parameters=parameters,
                tokens=tokens,
                arm=name_of(stages),
                stages=stages,
                seeds=len(seeds),
                speed_up_in_tokens=interval([exp(-difference / slope) for difference in differences]),
                loss_difference=interval(differences),
            )
        )
    if not trials:
        raise InvalidJobError("the runs have unshared training alone; give --from the runs of other arms, too")
    return trials


def _is_unshared(stages: tuple[Stage, ...]) -> bool:
    return len(stages) == 1 and not stages[0].shares


def _by_arm(runs: Iterable[Run]) -> dict[tuple[tuple[Stage, ...], int], Losses]:
    """Return (stages, tokens) -> losses at the best peak rate. Raises InvalidJobError for two runs of the same arm,
    rate and seed."""
    names: dict[tuple[tuple[Stage, ...], int, str, int], str] = {}
    by_rate: defaultdict[tuple[tuple[Stage, ...], int], dict[str, dict[int, float]]] = defaultdict(dict)
    for run in runs:
        key = (run.stages, run.tokens, run.rate, run.seed)
        if key in names:
            raise InvalidJobError(
                f"{names[key]} and {run.name} are two runs of {name_of(run.stages)} with data.seed {run.seed}; give"
                " one of them"
            )
        names[key] = run.name
        by_rate[run.stages, run.tokens].setdefault(run.rate, {})[run.seed] = run.loss
    return {arm: min(rates.values(), key=lambda losses: mean(losses.values())) for arm, rates in by_rate.items()}


def _slope(unshared: Mapping[int, Losses]) -> float:
    """Return the decrease of unshared training's loss for e times as many tokens, the mean over the common seeds."""
    *_, fewer, tokens = sorted(unshared)
    seeds = unshared[fewer].keys() & unshared[tokens].keys()
    if not seeds:
        raise InvalidJobError(
            f"unshared training with {fewer:,} tokens and with {tokens:,} have no seed (data.seed) in common"
        )
    slope = mean(unshared[fewer][seed] - unshared[tokens][seed] for seed in seeds) / log(tokens / fewer)
    if slope <= 0:
        raise InvalidJobError(
            f"unshared training is no better with {tokens:,} tokens than with {fewer:,}, so a loss cannot be turned"
            " into tokens; train longer (until), or with another optimizer.learningRate"
        )
    return slope
