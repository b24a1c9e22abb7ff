"""Measured trials: what arms with other phases reached beside unshared training. Read from evidence.json."""

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pseudoreal_trainer.estimate.advice.intervals import Interval

Study = Literal["dense", "experts"]
"""Kind of model."""


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Stage(_Model):
    """A phase of an arm: what its layers share, and how many layers and experts there are."""

    until: float = Field(gt=0, le=1)
    """End of the stage, as a fraction of the trial's tokens."""
    layers: int = Field(ge=1)
    blocks: int = Field(ge=1)
    """Distinct blocks, or distinct sets of experts with `shares_experts`; equal to `layers` without sharing."""
    shares_experts: bool = False
    experts: int | None = Field(None, ge=1)
    """Experts of a layer; None in a dense model."""

    @property
    def shares(self) -> bool:
        return self.blocks < self.layers


class Trial(_Model):
    """An arm of a trial beside unshared training of the same model, paired by seed."""

    study: Study
    width: int = Field(ge=1)
    parameters: int = Field(ge=1)
    """Matrix weights of the layers that a token is multiplied by, without embedding and head."""
    tokens: int = Field(ge=1)
    """Tokens of unshared training, and of the arm."""
    arm: str = Field(min_length=1, max_length=100)
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=16)
    seeds: int = Field(ge=1)
    speed_up_in_tokens: Interval
    """Tokens of unshared training ÷ tokens after which the arm has the final loss of unshared training."""
    loss_difference: Interval
    """Final loss of the arm minus the final loss of unshared training, in nats per token."""
    relative_rate: float | None = Field(None, gt=0)
    """Best peak learning rate of the arm ÷ best peak learning rate of unshared training; None if they are not known."""

    @model_validator(mode="after")
    def _ends_in_order(self) -> Self:
        ends = [stage.until for stage in self.stages]
        if ends != sorted(set(ends)) or ends[-1] != 1:
            raise ValueError(f"stages end at {ends}; each must end after the one before, the last one at 1")
        return self

    @model_validator(mode="after")
    def _reaches_the_loss(self) -> Self:
        if self.speed_up_in_tokens.mean <= 0:
            raise ValueError(f"speedUpInTokens.mean is {self.speed_up_in_tokens.mean:g}; it must be above 0")
        return self


class Evidence(_Model):
    trials: tuple[Trial, ...] = Field(max_length=10_000)


def read_evidence() -> Evidence:
    """Return the trials of this release."""
    text = (files("pseudoreal_trainer.estimate") / "evidence.json").read_bytes()
    return Evidence.model_validate_json(text)


def comparable_trials(trials: Sequence[Trial], study: Study, parameters: int) -> list[Trial]:
    """Return one trial of each arm of the study: of those with an interval, if there are any, the one at the common
    size, or else at the size nearest to `parameters`. Arms keep their order.

    The common size has the most arms with an interval, so that an arm and its controls are of one size; of several such
    sizes, the nearest to `parameters`.
    """
    of_study = [trial for trial in trials if trial.study == study]
    arms_at = Counter(trial.parameters for trial in of_study if trial.speed_up_in_tokens.low is not None)
    common = min(arms_at, key=lambda size: (-arms_at[size], _distance(size, parameters)), default=None)

    def preference(trial: Trial) -> tuple[bool, bool, float]:
        has_interval = trial.speed_up_in_tokens.low is not None
        return not has_interval, trial.parameters != common, _distance(trial.parameters, parameters)

    by_arm: dict[str, list[Trial]] = {}
    for trial in of_study:
        by_arm.setdefault(trial.arm, []).append(trial)
    return [min(of_arm, key=preference) for of_arm in by_arm.values()]


def _distance(size: int, parameters: int) -> float:
    return max(size / parameters, parameters / size)
