"""Advice for one job: unshared training and each candidate with its phases and seconds, and the recommendation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import UnresolvableJob, phase_config
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.candidates import (
    Candidate,
    NotApplicable,
    candidate_of,
    kind_of,
    study_of,
    unshared_stage,
    with_home,
    with_phases,
)
from pseudoreal_trainer.estimate.advice.costs import Costs, PhaseCost
from pseudoreal_trainer.estimate.advice.decision import Compared, Decision, Leg, decide, seconds, speed_up_in_seconds
from pseudoreal_trainer.estimate.advice.evidence import Stage, Study, Trial, comparable_trials, is_extrapolation
from pseudoreal_trainer.estimate.advice.intervals import Interval
from pseudoreal_trainer.plan.memory.from_config import phase_sizes

UNSHARED = "unshared"
MOST_ARMS = 50
"""Maximum number of arms: the phases of each may take minutes to plan."""
_DAY = 86_400
Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A way to train the job: its phases, and what they cost."""

    name: str
    stages: tuple[Stage, ...]
    costs: tuple[PhaseCost, ...]
    ends: tuple[int, ...]
    """Tokens from the job's start at which the phases end."""
    body: Json
    """The job with these phases."""
    candidate: Candidate | None
    """None for unshared training."""
    seconds: float | None
    """Seconds until the loss that unshared training has at its end; None if a phase does not fit."""
    speed_up: Interval | None
    """Seconds of unshared training ÷ `seconds`; None if a phase of either does not fit."""

    @property
    def fits(self) -> bool:
        return all(cost.fits for cost in self.costs)


@dataclass(frozen=True)
class Advice:
    job: PseudoRealJob
    study: Study
    parameters: int
    """Matrix weights of the layers that a token is multiplied by, without embedding and head."""
    tokens: int
    """Tokens of unshared training; candidates are compared at the loss that it ends with."""
    machine: str
    unshared: Plan
    plans: tuple[Plan, ...]
    """In the order of the trials."""
    left_out: dict[str, str]
    """Arm that does not apply to the job -> reason."""
    decision: Decision

    @property
    def recommended(self) -> Plan:
        return next((plan for plan in self.plans if plan.name == self.decision.candidate), self.unshared)

    def plan(self, name: str) -> Plan | None:
        return next((plan for plan in self.plans if plan.name == name), None)


@dataclass(frozen=True)
class Adviser:
    """Advice on one job and machine, from any trials."""

    body: Json
    """The job, as the user wrote it and as `check_job` accepts it."""
    costs: Costs
    say: Callable[[str], None] = lambda _: None
    """Called with the name of each candidate before its phases are planned, which can take minutes."""

    @cached_property
    def job(self) -> PseudoRealJob:
        return check_job(self.body)

    def advise(self, trials: Sequence[Trial], *, tokens: int | None = None, days: float | None = None) -> Advice:
        """Return the advice for a budget of unshared training: so many tokens, or so many days. Raises InvalidJobError
        if the job cannot be trained unshared, or if no length follows from `days`, and ValueError if the profile lacks
        a figure."""
        model = self.job.spec.model
        stages = (unshared_stage(model),)
        self.say(UNSHARED)
        try:
            (cost,) = self._costs(with_phases(self.body, stages, [2**62]))
        except InvalidJobError as error:
            raise InvalidJobError(f"candidates are compared with training without sharing, but {error}") from error
        if tokens is None:
            assert days is not None, "the caller gives one of both"
            tokens = _tokens_in(days, cost)
        if tokens < cost.tokens_per_step:
            raise InvalidJobError(
                f"the budget of {tokens:,} tokens is less than a step, which has {cost.tokens_per_step:,}; give a"
                " larger --tokens or --days"
            )
        duration = tokens * cost.seconds_per_token if cost.fits and cost.seconds_per_token is not None else None
        body = _with_homes(with_phases(self.body, stages, [tokens]), [cost])
        unshared = Plan(UNSHARED, stages, (cost,), (tokens,), body, None, duration, None)
        plans, left_out = self._plans(trials, tokens, unshared)
        parameters = parameters_of(cost.config)
        return Advice(
            job=self.job,
            study=study_of(model),
            parameters=parameters,
            tokens=tokens,
            machine=cost.machine,
            unshared=unshared,
            plans=tuple(plans),
            left_out=left_out,
            decision=_decision(unshared, plans, parameters),
        )

    def _plans(self, trials: Sequence[Trial], tokens: int, unshared: Plan) -> tuple[list[Plan], dict[str, str]]:
        """Return the plans of the arms that apply to the job, and the reasons why the others do not."""
        model = self.job.spec.model
        compared = comparable_trials(trials, study_of(model), parameters_of(unshared.costs[0].config))
        if len(compared) > MOST_ARMS:
            raise InvalidJobError(
                f"{len(compared)} arms are more than the {MOST_ARMS} that are compared; give fewer --from"
            )
        plans: list[Plan] = []
        left_out: dict[str, str] = {}
        for trial in compared:
            kind = kind_of(trial.stages)
            if kind is None:
                continue
            self.say(trial.arm)
            try:
                plans.append(self._plan(candidate_of(trial, kind, model), tokens, unshared))
            except NotApplicable as error:
                left_out[trial.arm] = str(error)
        return plans, left_out

    def _plan(self, candidate: Candidate, tokens: int, unshared: Plan) -> Plan:
        """Return the plan of a candidate. Raises NotApplicable if the job may not have such phases."""
        stages, speed_up = candidate.stages, candidate.trial.speed_up_in_tokens
        ends = _ends(stages, tokens, speed_up.mean, unshared.costs[0].tokens_per_step)
        body = with_phases(self.body, stages, ends)
        try:
            costs = self._costs(body)
        except InvalidJobError as error:
            raise NotApplicable(str(error)) from error
        duration = faster = None
        legs = _legs(stages, costs)
        if legs is not None:
            duration = seconds(legs, tokens, speed_up.mean)
            if unshared.seconds is not None:
                faster = speed_up_in_seconds(legs, unshared.seconds / tokens, speed_up)
        return Plan(
            candidate.name, stages, tuple(costs), tuple(ends), _with_homes(body, costs), candidate, duration, faster
        )

    def _costs(self, body: Json) -> list[PhaseCost]:
        """Return the cost of each phase. Raises InvalidJobError if the job may not have these phases."""
        try:
            job = check_job(body)
            check_resolvable(job.spec)
        except (InvalidJob, UnresolvableJob) as error:
            raise InvalidJobError(str(error)) from error
        return [
            self.costs.of(phase_config(job, index, execution=1, work_directory=".", offload_directory="."))
            for index in range(len(job.spec.phases))
        ]


def parameters_of(config: PhaseConfig) -> int:
    """Return the matrix weights of the layers that a token is multiplied by."""
    sizes = phase_sizes(config, "cpu")
    # Without pairs of tokens, the operations of a layer are two for each weight.
    return sum(sizes.block_flops(1, layer, 0) for layer in range(sizes.model.layers)) // 2


def _tokens_in(days: float, cost: PhaseCost) -> int:
    if not cost.fits or cost.seconds_per_token is None:
        raise InvalidJobError(
            f"--days {days:g} gives no number of tokens, because unshared training does not fit"
            f" ({'; '.join(cost.reasons)}); give --tokens"
        )
    tokens = days * _DAY / cost.seconds_per_token
    if tokens > 2**62:
        raise InvalidJobError(f"--days {days:g} are more tokens than a job may have; give fewer days")
    return int(tokens)


def _ends(stages: Sequence[Stage], tokens: int, speed_up: float, tokens_per_step: int) -> list[int]:
    """Return the tokens at which the stages end. Raises NotApplicable if a stage has no step."""
    *first, last = [round(stage.until * tokens) for stage in stages[:-1]] + [ceil(tokens / speed_up)]
    begins = [0, *first]
    for begin, end in zip(begins, [*first, last], strict=True):
        if end - begin < tokens_per_step:
            raise NotApplicable(
                f"a phase of the arm would have {end - begin:,} tokens, and a step has {tokens_per_step:,}; give a"
                " larger --tokens or --days"
            )
    return [*first, last]


def _with_homes(body: Json, costs: Sequence[PhaseCost]) -> Json:
    """Return the job with the homes in which its phases were planned."""
    phases = [
        with_home(phase, cost.config.offload.home) if cost.moved else phase
        for phase, cost in zip(body["spec"]["phases"], costs, strict=True)
    ]
    return body | {"spec": body["spec"] | {"phases": phases}}


def _legs(stages: Sequence[Stage], costs: Sequence[PhaseCost]) -> list[Leg] | None:
    """Return the legs; None if a phase does not fit."""
    legs = []
    for stage, cost in zip(stages, costs, strict=True):
        if not cost.fits or cost.seconds_per_token is None:
            return None
        legs.append(Leg(stage.until, cost.seconds_per_token))
    return legs


def _decision(unshared: Plan, plans: Sequence[Plan], parameters: int) -> Decision:
    if not unshared.fits:
        reasons = "; ".join(unshared.costs[0].reasons)
        return Decision(
            "DoesNotFit",
            None,
            f"the job's own model does not fit, and each candidate ends with it: {reasons}",
        )
    return decide(
        [
            Compared(plan.name, found.kind, plan.speed_up, is_extrapolation(parameters, found.trial))
            for plan in plans
            if (found := plan.candidate) is not None
        ]
    )
