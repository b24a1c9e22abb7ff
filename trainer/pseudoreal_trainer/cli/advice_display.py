"""Output of `pseudoreal advise`: tables and sentences for people, JSON for programs."""

import shlex
from pathlib import Path
from typing import Any

from pseudoreal_api.quantity import readable_bytes
from rich.console import Console
from rich.table import Table

from pseudoreal_trainer.estimate.advice.advice import Advice, Plan
from pseudoreal_trainer.estimate.advice.candidates import describe
from pseudoreal_trainer.estimate.advice.certainty import deciding_plan, distance, sentences, size_ratio
from pseudoreal_trainer.estimate.advice.costs import Costs, PhaseCost
from pseudoreal_trainer.estimate.advice.decision import Verdict, interval_text
from pseudoreal_trainer.estimate.advice.evidence import Stage, Trial, is_extrapolation
from pseudoreal_trainer.estimate.advice.intervals import Interval
from pseudoreal_trainer.estimate.advice.trial import SEEDS, TrialJob, trial_seconds

_DAY, _HOUR = 86_400, 3_600
_RECOMMENDATIONS: dict[Verdict, str] = {
    "Take": "take {}",
    "Level": "none: train without sharing; it is level, so take none, or settle it by a trial",
    "None": "none: train without sharing",
    "DoesNotFit": "none: take more ranks, another offload.home or a smaller model first",
    "NoEvidence": "none: train without sharing; there is no evidence for anything else",
}


def show(console: Console, advice: Advice, trials: tuple[Trial, ...], *, from_runs: bool) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    far = distance(advice)
    say(
        f"job {advice.job.metadata.name}, {advice.study}: {advice.parameters:,} parameters in the layers; on"
        f" {advice.machine}{'' if far is None else f'; {far}'}"
    )
    console.print(_plans_table(advice))
    console.print(_phases_table(advice))
    for sentence in _memory(advice):
        say(sentence)
    say(f"recommendation: {_recommendation(advice)}")
    say(f"because {advice.decision.reason}")
    say("how sure:")
    for sentence in sentences(advice, trials):
        say(f"- {sentence}")
    for arm, reason in advice.left_out.items():
        say(f"left out: {arm}: {reason}")
    if advice.plans and not from_runs:
        say("a trial on your own text would settle it: --trial FOLDER writes its job files")


def _recommendation(advice: Advice) -> str:
    text = _RECOMMENDATIONS[advice.decision.verdict].format(advice.decision.candidate)
    if _is_extrapolated(advice.recommended, advice):
        return f"{text}, if a trial on your own text and of a larger model agrees: so far it is an extrapolation"
    return text


def _plans_table(advice: Advice) -> Table:
    title = f"to the loss that unshared training has after {advice.tokens:,} tokens"
    table = Table("arm", "phases", "tokens", "days", "speed-up in seconds", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for plan in (advice.unshared, *advice.plans):
        days = "" if plan.seconds is None else f"{plan.seconds / _DAY:.3g}"
        table.add_row(_name(plan), describe(plan.stages), f"{plan.ends[-1]:,}", days, _speed_up(plan, advice))
    return table


def _name(plan: Plan) -> str:
    ends_smaller = plan.candidate is not None and plan.candidate.kind == "Throughout"
    return f"{plan.name} (smaller)" if ends_smaller else plan.name


def _speed_up(plan: Plan, advice: Advice) -> str:
    if not plan.fits:
        return "does not fit"
    if plan is advice.unshared:
        return "1"
    found = _known_speed_up(plan, advice)
    if found is None:
        return ""
    return f"{found.mean:.2f}" if _is_extrapolated(plan, advice) else interval_text(found)


def _is_extrapolated(plan: Plan, advice: Advice) -> bool:
    return plan.candidate is not None and is_extrapolation(advice.parameters, plan.candidate.trial)


def _known_speed_up(plan: Plan, advice: Advice) -> Interval | None:
    """Return the speed-up in seconds; without the ends of the interval, if the trial's model has another size."""
    if plan.speed_up is None or not _is_extrapolated(plan, advice):
        return plan.speed_up
    return Interval(mean=plan.speed_up.mean)


def _phases_table(advice: Advice) -> Table:
    names = ("layout", "state", "s a step", "of a real step", "device, peak")
    table = Table("phase", *names, title=f"phases, in steps of {advice.unshared.costs[0].tokens_per_step:,} tokens")
    for column in table.columns[3:]:
        column.justify = "right"
    for stage, cost in _distinct_phases(advice):
        table.add_row(
            describe([stage.model_copy(update={"until": 1})]),
            _layout(cost),
            _homes(cost),
            "" if cost.step_seconds is None else f"{cost.step_seconds:.4g}",
            _ratio(cost, advice.unshared.costs[0]),
            "" if cost.peak_device_bytes is None else readable_bytes(cost.peak_device_bytes),
        )
    return table


def _distinct_phases(advice: Advice) -> list[tuple[Stage, PhaseCost]]:
    """Return each phase of the plans once, unshared training's first."""
    found: dict[Stage, PhaseCost] = {}
    for plan in (advice.unshared, *advice.plans):
        for stage, cost in zip(plan.stages, plan.costs, strict=True):
            found.setdefault(stage.model_copy(update={"until": 1}), cost)
    return [*found.items()]


def _ratio(cost: PhaseCost, real: PhaseCost) -> str:
    if cost.step_seconds is None or real.step_seconds is None:
        return ""
    return f"{cost.step_seconds / real.step_seconds:.3g}"


def _layout(cost: PhaseCost) -> str:
    asked, batch = cost.config.parallelism, cost.config.batch
    ranks = {
        "pipeline": asked.pipeline,
        "replicas": asked.replicas,
        "expertRanks": asked.expert_ranks,
        "contextRanks": asked.context_ranks,
        "tensorRanks": asked.tensor_ranks,
    }
    several = [f"{name} {number}" for name, number in ranks.items() if number > 1]
    sharding = [f"stateSharding {asked.state_sharding}"] if asked.state_sharding != "None" else []
    return ", ".join(
        [
            *several,
            asked.schedule,
            *sharding,
            f"microBatches {batch.micro_batches}",
            f"keep {cost.config.activations.keep}",
        ]
    )


def _homes(cost: PhaseCost) -> str:
    offload = cost.config.offload
    named = "budget" if offload.budget is not None else "homes" if offload.homes else offload.home
    if not cost.fits:
        return f"{named}; does not fit"
    return f"{named} (not as in the job)" if cost.moved else named


def _memory(advice: Advice) -> list[str]:
    """Return sentences on phases that do not fit as the job lays them out, and on their cost elsewhere."""
    found = []
    real = advice.unshared.costs[0]
    if real.moved and real.config.offload.home != "Device":
        found.append(
            f"unshared training does not fit with the job's offload; with offload.home {real.config.offload.home} a"
            f" step takes {real.step_seconds:.4g} s"
        )
    for stage, cost in _distinct_phases(advice):
        found += [f"does not fit: {describe([stage.model_copy(update={'until': 1})])}: {r}" for r in cost.reasons]
    return found


def as_json(advice: Advice, trials: tuple[Trial, ...]) -> dict[str, Any]:
    """Return the advice for programs; the keys are stable."""
    plan = deciding_plan(advice)
    trial = plan.candidate.trial if plan is not None and plan.candidate is not None else None
    return {
        "job": advice.job.metadata.name,
        "study": advice.study,
        "parameters": advice.parameters,
        "tokens": advice.tokens,
        "machine": advice.machine,
        "recommendation": {
            "verdict": advice.decision.verdict,
            "arm": advice.recommended.name,
            "reason": advice.decision.reason,
            "phases": advice.recommended.body["spec"]["phases"],
        },
        "certainty": {
            "arm": None if trial is None else trial.arm,
            "seeds": None if trial is None else trial.seeds,
            "times_larger": None if trial is None else size_ratio(advice, trial),
            "is_extrapolation": None if trial is None else is_extrapolation(advice.parameters, trial),
            "sentences": sentences(advice, trials),
        },
        "arms": [_plan_json(plan, advice) for plan in (advice.unshared, *advice.plans)],
        "left_out": advice.left_out,
    }


def _plan_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    speed_up = _known_speed_up(plan, advice)
    trial = plan.candidate.trial if plan.candidate is not None else None
    return {
        "name": plan.name,
        "kind": "Unshared" if plan.candidate is None else plan.candidate.kind,
        "fits": plan.fits,
        "seconds": plan.seconds,
        "speed_up_in_seconds": None if speed_up is None else speed_up.model_dump(),
        "speed_up_in_tokens": None if trial is None else trial.speed_up_in_tokens.model_dump(),
        "loss_difference": None if trial is None else trial.loss_difference.model_dump(),
        "seeds": None if trial is None else trial.seeds,
        "phases": [
            _phase_json(stage, cost, end) for stage, cost, end in zip(plan.stages, plan.costs, plan.ends, strict=True)
        ],
    }


def _phase_json(stage: Stage, cost: PhaseCost, end: int) -> dict[str, Any]:
    asked = cost.config.parallelism
    return {
        "layers": stage.layers,
        "blocks": stage.blocks,
        "shares_experts": stage.shares_experts,
        "experts": stage.experts,
        "until_tokens": end,
        "step_seconds": cost.step_seconds,
        "tokens_per_step": cost.tokens_per_step,
        "bottleneck": cost.bottleneck,
        "peak_device_bytes": cost.peak_device_bytes,
        "fits": cost.fits,
        "reasons": list(cost.reasons),
        "home": cost.config.offload.home,
        "layout": {
            "pipeline": asked.pipeline,
            "schedule": asked.schedule,
            "state_sharding": asked.state_sharding,
            "replicas": asked.replicas,
            "expert_ranks": asked.expert_ranks,
            "context_ranks": asked.context_ranks,
            "tensor_ranks": asked.tensor_ranks,
            "micro_batches": cost.config.batch.micro_batches,
            "keep": cost.config.activations.keep,
        },
    }


def trial_text(advice: Advice, costs: Costs, jobs: list[TrialJob], job: Path, folder: Path) -> str:
    """Return the summary of a trial: its runs, their time, and the commands."""
    labels = list(dict.fromkeys(one.label for one in jobs))
    hours = trial_seconds(costs, jobs) / _HOUR
    quoted = shlex.quote(str(folder))
    return "\n".join(
        [
            f"{folder}: {len(jobs)} jobs: {', '.join(labels)}, each with {len(SEEDS)} seeds; about {hours:.2g} hours by"
            f" the planner on {advice.machine}, one after the other",
            f'run:    for job in {quoted}/*.yaml; do pseudoreal run "$job" --workdir'
            f' {quoted}/runs/"$(basename "$job" .yaml)"; done',
            f"decide: pseudoreal advise {shlex.quote(str(job))} --tokens {advice.tokens} --from {quoted}/runs",
            "larger models (spec.model) and more steps (until, data.validation.everySteps) say more about the job;"
            " change them in all files alike. Runs with other peak rates (optimizer.learningRate) may be added: each"
            " arm is judged at its best rate",
        ]
    )
