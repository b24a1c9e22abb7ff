"""How sure an advice is: sentences on its evidence, and on how far the job is from the trials. Pure."""

from pseudoreal_trainer.estimate.advice.advice import Advice, Plan
from pseudoreal_trainer.estimate.advice.decision import interval_text
from pseudoreal_trainer.estimate.advice.evidence import NEAR, Trial, is_extrapolation

_SAME = 0.1
"""Deviation up to which a stage counts as the same part of a model."""


def size_ratio(advice: Advice, trial: Trial) -> float:
    """Return the parameters of the job's model ÷ the parameters of the trial's."""
    return advice.parameters / trial.parameters


def distance(advice: Advice) -> str | None:
    """Return how far the job's model is from the largest trial whose result the advice uses; None if it is near."""
    used = [plan.candidate.trial for plan in advice.plans if plan.candidate is not None]
    largest = max(used, key=lambda trial: trial.parameters, default=None)
    if largest is None or not is_extrapolation(advice.parameters, largest):
        return None
    ratio = size_ratio(advice, largest)
    if ratio < 1:
        return f"extrapolated to a model {1 / ratio:,.0f} times smaller than the trials'; no interval"
    return f"extrapolated {ratio:,.0f} times beyond the trials; no interval"


def deciding_plan(advice: Advice) -> Plan | None:
    """Return the recommended candidate, or else the one with the largest mean; None without a candidate."""
    if advice.decision.candidate is not None:
        return advice.recommended
    eligible = [plan for plan in advice.plans if plan.candidate is not None and plan.candidate.kind != "Throughout"]
    compared = [plan for plan in eligible if plan.speed_up is not None]
    return max(compared, key=lambda plan: plan.speed_up.mean if plan.speed_up else 0.0, default=None)


def sentences(advice: Advice, trials: tuple[Trial, ...]) -> list[str]:
    """Return what the advice rests on. `trials`: all trials, of which one of each arm decided."""
    plan = deciding_plan(advice)
    if plan is None or plan.candidate is None:
        return _about_the_job(advice)
    trial = plan.candidate.trial
    return [
        _on_trial(trial),
        *_on_other_sizes(trial, trials),
        _on_distance(advice, trial),
        *_on_parts(plan, trial),
        _on_tokens(advice, trial),
        *_on_rate(advice, trial),
        *_about_the_job(advice),
    ]


def _on_trial(trial: Trial) -> str:
    seeds = "one seed" if trial.seeds == 1 else f"{trial.seeds} seeds"
    return (
        f"evidence for {trial.arm}: {seeds}, {trial.parameters:,} parameters in the layers, {trial.tokens:,} tokens;"
        f" speed-up in tokens {interval_text(trial.speed_up_in_tokens)}, final loss"
        f" {interval_text(trial.loss_difference, '+.4f')} nats beside unshared training"
    )


def _on_other_sizes(trial: Trial, trials: tuple[Trial, ...]) -> list[str]:
    others = [
        f"{other.parameters:,} parameters: {interval_text(other.speed_up_in_tokens)}"
        for other in sorted(trials, key=lambda other: other.parameters)
        if (other.study, other.arm) == (trial.study, trial.arm) and other != trial
    ]
    return [f"the same arm at other sizes: {'; '.join(others)}"] if others else []


def _on_distance(advice: Advice, trial: Trial) -> str:
    ratio = size_ratio(advice, trial)
    size = f"the job's model has {advice.parameters:,} such parameters, {_times(ratio)} the trial's"
    if is_extrapolation(advice.parameters, trial):
        return f"{size}: an extrapolation, nothing of that size was measured"
    return f"{size}: near to what was measured"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= NEAR else f"{ratio:.2g} times"


def _on_parts(plan: Plan, trial: Trial) -> list[str]:
    """Return a sentence if the stages are other parts of the job's model than of the trial's."""
    found = []
    for stage, tried in zip(plan.stages, trial.stages, strict=True):
        parts = {
            "layers": (stage.layers / plan.stages[-1].layers, tried.layers / trial.stages[-1].layers),
            "blocks": (stage.blocks / stage.layers, tried.blocks / tried.layers),
        }
        found += [
            f"{name} of the first stages are {own:.2f} of all where the trial had {measured:.2f}"
            for name, (own, measured) in parts.items()
            if stage.until < 1 and abs(own - measured) > _SAME * measured
        ]
    return found


def _on_tokens(advice: Advice, trial: Trial) -> str:
    return (
        f"the trial read {trial.tokens / trial.parameters:.3g} tokens for each parameter, the job reads"
        f" {advice.tokens / advice.parameters:.3g}"
    )


def _on_rate(advice: Advice, trial: Trial) -> list[str]:
    """Return a proposal of the peak learning rate."""
    rate, proposed = advice.job.spec.optimizer.learning_rate, ""
    if trial.relative_rate is None:
        return [
            f"the job keeps spec.optimizer.learningRate {rate}; the best peak rate may differ from arm to arm, so try"
            " the double and the half, too"
        ]
    if trial.relative_rate != 1:
        proposed = f"; if {rate} is the best for unshared training, take {trial.relative_rate * float(rate):g}"
    return [
        f"the job keeps spec.optimizer.learningRate {rate}; in the trials the best peak rate of this arm was"
        f" {trial.relative_rate:g} times the best of unshared training{proposed}"
    ]


def _about_the_job(advice: Advice) -> list[str]:
    spec = advice.job.spec
    found = [f"seconds are predictions of the planner for {advice.machine}, not measurements"]
    if spec.phases[-1].sharing is not None:
        found.append("the last phase of the job shares weights; the advice is about the same model without sharing")
    if spec.optimizer.schedule != "WarmupStableDecay":
        found.append(
            "stages of the trials end while the learning rate is at its peak, and spec.optimizer.schedule is"
            f" {spec.optimizer.schedule}; set WarmupStableDecay"
        )
    if spec.checkpoint.start_from is not None or spec.checkpoint.continue_from is not None:
        found.append(
            "the trials began with random weights, and the job begins with trained ones (spec.checkpoint.startFrom,"
            " continueFrom): nothing of that kind was measured"
        )
    return found
