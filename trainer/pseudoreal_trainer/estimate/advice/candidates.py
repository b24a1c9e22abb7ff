"""Arms of the trials as candidates for a job: their stages scaled to the job's layers and experts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Home

from pseudoreal_trainer.estimate.advice.evidence import Stage, Study, Trial

Kind = Literal["Sharing", "Growth", "Throughout"]
"""Sharing: layers share weights at first. Growth: the model has fewer layers or experts at first. Throughout: layers
share weights to the end, so the arm ends with a smaller model than the job's."""
Json = dict[str, Any]
_NOISE = "0.1"
"""spec.delink.noise of arms that copy experts, as in the trials: equal experts would never part."""


class NotApplicable(ValueError):
    """The job's model cannot be trained in the stages of an arm; the text gives the reason."""


@dataclass(frozen=True)
class Candidate:
    """An arm for the job."""

    name: str
    kind: Kind
    stages: tuple[Stage, ...]
    """Stages with the layers, blocks and experts of the job."""
    trial: Trial


def study_of(model: Model) -> Study:
    return "dense" if model.experts is None else "experts"


def unshared_stage(model: Model) -> Stage:
    count = model.experts.count if model.experts else None
    return Stage(until=1, layers=model.layers, blocks=model.layers, experts=count)


def kind_of(stages: Sequence[Stage]) -> Kind | None:
    """Return the kind of an arm; None for unshared training, of a model of any width."""
    if stages[-1].shares:
        return "Throughout"
    if any(stage.shares for stage in stages):
        return "Sharing"
    return "Growth" if len(stages) > 1 else None


def candidate_of(trial: Trial, kind: Kind, model: Model) -> Candidate:
    """Return the trial's arm as a candidate for the model. Raises NotApplicable."""
    full = trial.stages[-1]
    stages = tuple(_scaled(stage, full, model) for stage in trial.stages)
    real = unshared_stage(model)
    for stage in stages[: None if kind == "Throughout" else -1]:
        if (stage.layers, stage.blocks, stage.experts) == (real.layers, real.blocks, real.experts):
            raise NotApplicable(
                f"the arm's first stages are parts of {full.layers} layers"
                + (f" and {full.experts} experts" if full.experts else "")
                + f" that spec.model, with {model.layers} layers"
                + (f" and {real.experts} experts" if real.experts else "")
                + ", cannot be divided into"
            )
    return Candidate(trial.arm, kind, stages, trial)


def _scaled(stage: Stage, full: Stage, model: Model) -> Stage:
    layers = _part(model.layers, stage.layers, full.layers)
    count = unshared_stage(model).experts
    return Stage(
        until=stage.until,
        layers=layers,
        blocks=_part(layers, stage.blocks, stage.layers),
        shares_experts=stage.shares_experts,
        experts=_part(count, stage.experts, full.experts) if count and stage.experts and full.experts else count,
    )


def _part(whole: int, part: int, of: int) -> int:
    """Return 1 for 1, and otherwise the divisor of `whole` whose share is nearest to `part` / `of`."""
    if part == 1:
        return 1
    wanted = whole * part / of
    divisors = [number for number in range(1, whole + 1) if whole % number == 0]
    return min(divisors, key=lambda number: max(number / wanted, wanted / number))


def describe(stages: Sequence[Stage]) -> str:
    """Return the stages in words, such as "12 layers with 1 block to 30 %, then 12 layers"."""
    return ", then ".join(f"{_words(stage)}{_end(stage)}" for stage in stages)


def _end(stage: Stage) -> str:
    return "" if stage.until == 1 else f" to {100 * stage.until:.0f} %"


def _words(stage: Stage) -> str:
    layers = "1 layer" if stage.layers == 1 else f"{stage.layers} layers"
    experts = "" if stage.experts is None else f" of {stage.experts} experts"
    if not stage.shares:
        return f"{layers}{experts}"
    return f"{layers}{experts} with {_shared(stage)}"


def _shared(stage: Stage) -> str:
    noun = "block" if stage.blocks == 1 else "blocks"
    if stage.shares_experts:
        noun = "set of experts" if stage.blocks == 1 else "sets of experts"
    return f"{stage.blocks} {noun}"


def name_of(stages: Sequence[Stage]) -> str:
    """Return a name for an arm, without the size of its model, such as "1 block to 30 %"."""
    full = stages[-1]
    if len(stages) == 1:
        return f"{_shared(full)} throughout" if full.shares else "unshared"
    return ", ".join(f"{_part_name(stage, full)}{_end(stage)}" for stage in stages[:-1])


def _part_name(stage: Stage, full: Stage) -> str:
    """Return what a stage has of the model, such as "4 of 12 layers with 1 block"."""
    parts = [f"{stage.layers} of {full.layers} layers"] if stage.layers < full.layers else []
    if stage.experts is not None and full.experts is not None and stage.experts < full.experts:
        parts.append(f"{stage.experts} of {full.experts} experts")
    if stage.shares:
        parts.append(_shared(stage))
    return " with ".join(parts)


def with_phases(body: Json, stages: Sequence[Stage], ends: Sequence[int]) -> Json:
    """Return the job with a phase for each stage. `ends`: tokens from the job's start at which they end.

    Each phase is a copy of the job's last phase, apart from name, sharing, layers, experts and end, and without homes
    of single units, which are other ones where layers share.
    """
    template = body["spec"]["phases"][-1]
    full = stages[-1]
    names = _names(stages, template["name"])
    phases = [
        _copied(template, is_whole=stage is full and not stage.shares)
        | {"name": name, "until": {"tokens": end}}
        | _size(stage, full)
        for stage, end, name in zip(stages, ends, names, strict=True)
    ]
    spec = body["spec"] | {"phases": phases}
    # Nulls mean the default, as for the API server.
    delink = spec.get("delink") or {}
    if any(stage.experts != full.experts for stage in stages) and float(delink.get("noise") or 0) == 0:
        spec |= {"delink": delink | {"noise": _NOISE}}
    return body | {"spec": spec}


def with_home(phase: Json, home: Home) -> Json:
    """Return the phase with the whole state in this home."""
    return phase | {"offload": _without_unit_homes(phase.get("offload") or {}) | {"home": home}}


def _copied(template: Json, *, is_whole: bool) -> Json:
    kept = {key: value for key, value in template.items() if key not in ("sharing", "layers", "growth", "experts")}
    if is_whole or not kept.get("offload"):
        return kept
    return kept | {"offload": _without_unit_homes(kept["offload"])}


def _without_unit_homes(offload: Json) -> Json:
    return {key: value for key, value in offload.items() if key != "homes"}


def _names(stages: Sequence[Stage], last: str) -> list[str]:
    numbered = len(stages) > 2
    words = ["pseudo" if stage.shares else "small" for stage in stages[:-1]]
    first = [f"{word}-{number}" if numbered else word for number, word in enumerate(words, 1)]
    return [*(f"{name}-first" if name == last else name for name in first), last]


def _size(stage: Stage, full: Stage) -> Json:
    sharing: Json = {"blocks": stage.blocks} | ({"parts": ["Experts"]} if stage.shares_experts else {})
    return (
        ({"sharing": sharing} if stage.shares else {})
        | ({"layers": stage.layers} if stage.layers != full.layers else {})
        | ({"experts": stage.experts} if stage.experts != full.experts else {})
    )
