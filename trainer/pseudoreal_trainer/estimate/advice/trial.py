"""Job files of a short trial on the user's own text: unshared training and the best arms of each kind, with several
seeds. Pure.

The model is small, as in this project's own trials, and has the form of the job's model. Unshared training also runs
for half of the tokens: the slope of its loss turns a difference of losses into a speed-up in tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.model import Model

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.advice import Advice, Json, Plan
from pseudoreal_trainer.estimate.advice.candidates import (
    Kind,
    NotApplicable,
    candidate_of,
    kind_of,
    unshared_stage,
    with_phases,
)
from pseudoreal_trainer.estimate.advice.costs import Costs
from pseudoreal_trainer.estimate.advice.evidence import Stage

SEEDS = (1, 2, 3, 4, 5)
STEPS = 400
WARMUP_STEPS = 12
_ARMS: dict[Kind, int] = {"Sharing": 2, "Growth": 1, "Throughout": 1}
"""Kind -> the most arms of the kind that are tried."""

_LAYERS, _HIDDEN, _HEADS, _EXPERTS, _CHOICES = 12, 32, 4, 8, 2
_SEQUENCE, _SEQUENCES = 128, 16
_VALIDATED = 256
"""Sequences of validation text that are measured at least."""
_RATE = "8e-3"


@dataclass(frozen=True)
class TrialJob:
    label: str
    """Name of the arm and its budget, the same for all seeds."""
    seed: int
    body: Json

    @property
    def file(self) -> str:
        return f"{self.label}-seed{self.seed}.yaml"


def trial_jobs(advice: Advice, folder: Path) -> list[TrialJob]:
    """Return the jobs of the trial. `folder`: folder of the user's job file, which relative paths of text start from.

    Raises InvalidJobError if no arm applies to a small model of the job's form.
    """
    model = _small_model(advice.job.spec.model)
    real = (unshared_stage(model),)
    arms: dict[str, tuple[tuple[Stage, ...], int]] = {"unshared": (real, STEPS), "unshared-half": (real, STEPS // 2)}
    for kind, most in _ARMS.items():
        arms |= {
            f"{kind.lower()}-{number}": (stages, STEPS)
            for number, stages in enumerate(_stages_of(advice.plans, kind, model)[:most], 1)
        }
    if len(arms) == 2:
        raise InvalidJobError(f"there is no arm to try for this job: {advice.decision.reason}")
    return [
        TrialJob(label, seed, _checked(_body(advice.job, model, stages, steps, f"trial-{label}-{seed}", seed, folder)))
        for label, (stages, steps) in arms.items()
        for seed in SEEDS
    ]


def _stages_of(plans: Sequence[Plan], kind: Kind, model: Model) -> list[tuple[Stage, ...]]:
    """Return the stages of the arms of a kind that apply to the small model, the fastest first."""
    of_kind = [plan for plan in plans if plan.candidate is not None and plan.candidate.kind == kind]
    found = []
    for plan in sorted(of_kind, key=lambda plan: -plan.speed_up.mean if plan.speed_up else 0.0):
        assert plan.candidate is not None, "the plan has a kind"
        trial = plan.candidate.trial
        own = kind_of(trial.stages)
        assert own is not None, "a candidate's arm is not unshared training"
        try:
            found.append(candidate_of(trial, own, model).stages)
        except NotApplicable:
            continue
    return found


def _small_model(model: Model) -> Model:
    body = model.to_dict()
    width = _HIDDEN / model.hidden_size
    attention = {"heads": _HEADS, "bias": model.attention.bias, "queryKeyNorm": model.attention.query_key_norm}
    if model.key_size < model.query_size:
        attention["keyValueHeads"] = _HEADS // 2
    size = max(1, round(width * model.feed_forward.size))
    body |= {
        "layers": min(_LAYERS, model.layers),
        "hiddenSize": _HIDDEN,
        "sequenceLength": min(_SEQUENCE, model.sequence_length),
        "attention": attention,
        "feedForward": body["feedForward"] | {"size": size},
    }
    if model.experts is not None:
        body["experts"] = _few_experts(model, body["experts"], width)
    return Model.model_validate(body)


def _few_experts(model: Model, body: Json, width: float) -> Json:
    experts = model.experts
    assert experts is not None, "the caller asked"
    body = {key: value for key, value in body.items() if key != "denseLayers"}
    if experts.count > _EXPERTS:
        body |= {"count": _EXPERTS, "prototypes": min(experts.prototypes, _CHOICES)}
    if experts.top_k is not None:
        body["topK"] |= {
            "perToken": min(experts.top_k.per_token, _CHOICES),
            "size": max(1, round(width * model.expert.size)),
            "sharedExperts": min(experts.top_k.shared_experts, 1),
        }
    return body


def _body(
    job: PseudoRealJob, model: Model, stages: Sequence[Stage], steps: int, name: str, seed: int, folder: Path
) -> Json:
    tokens_per_step = _SEQUENCES * model.sequence_length
    phase = {"name": "real", "batch": {"sequences": _SEQUENCES}, "activations": {"keep": "All"}}
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "model": model.to_dict(),
            "data": _data(job.spec, seed, folder),
            "optimizer": job.spec.optimizer.to_dict() | _SCHEDULE,
            "precision": job.spec.precision.to_dict(),
            "phases": [phase],
            "delink": job.spec.delink.to_dict(),
            "checkpoint": {"everySteps": STEPS, "keepLast": 1},
        },
    }
    return with_phases(body, stages, [round(stage.until * steps) * tokens_per_step for stage in stages])


_SCHEDULE = {
    "learningRate": _RATE,
    "warmupSteps": WARMUP_STEPS,
    "schedule": "WarmupStableDecay",
    "decayFraction": "0.2",
    "finalFraction": "0",
}


def _data(spec: PseudoRealJobSpec, seed: int, folder: Path) -> Json:
    """Return the job's data section with this seed, for a machine without the job's volume."""
    data = {key: value for key, value in spec.data.to_dict().items() if key != "volume"}
    validation = {key: value for key, value in data["validation"].items() if key != "samples"}
    validation |= {"everySteps": STEPS, "sequences": max(_VALIDATED, spec.data.validation.sequences)}
    return data | {"path": str(folder / spec.data.path), "seed": seed, "validation": validation}


def _checked(body: Json) -> Json:
    try:
        check_job(body)
    except InvalidJob as error:
        raise InvalidJobError(f"the job {body['metadata']['name']} cannot be written: {error}") from error
    return body


def trial_seconds(costs: Costs, jobs: Sequence[TrialJob]) -> float:
    """Return the seconds of all jobs, one after the other, without validation and starts."""
    return sum(_job_seconds(costs, check_job(job.body)) for job in jobs)


def _job_seconds(costs: Costs, job: PseudoRealJob) -> float:
    total, before = 0.0, 0
    for index in range(len(job.spec.phases)):
        config = phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
        total += (config.phase_steps - before) * (costs.of(config).step_seconds or 0.0)
        before = config.phase_steps
    return total
