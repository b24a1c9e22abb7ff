"""An arm as a chain of jobs: a trunk at the peak rate, and decays that branch off it. Pure.

Every link of a chain is a job that continues the link before it (spec.checkpoint.continueFrom). Links with the same
content have the same key, so arms that begin alike train their beginning once.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pseudoreal_api.names import work_folder
from pseudoreal_api.spec.job import PseudoRealJob

from benchmarks.method import arms
from benchmarks.method.arms import REGISTERED, Arm, Scale, Stage, Study

NAME = "method"
NOISE = "0.1"
"""spec.delink.noise where experts are copied: without noise, copies of an expert would tie for ever."""


@dataclass(frozen=True)
class Run:
    """An arm with its width, text, seed and peak rate."""

    study: Study
    arm: Arm
    width: int
    seed: int
    rate: float
    text: str
    fraction: float = 1.0
    """Steps of this run, as a fraction of the full budget; the arm's stages are fractions of these steps."""
    scale: Scale = REGISTERED
    first_rate: float | None = None
    """Peak rate of the first stage; None: `rate`."""

    @property
    def label(self) -> str:
        return f"{self.study} {self.width}, {self.arm.name}, seed {self.seed}, rate {self.rate:g}"

    @property
    def own_width(self) -> int:
        return self.arm.width.get(self.width, self.width)

    @property
    def steps(self) -> int:
        return round(self.fraction * self.full_steps)

    @property
    def full_steps(self) -> int:
        return arms.full_steps(self.study, self.width, self.scale)

    @property
    def first_stage_end(self) -> int:
        return round(self.steps * self.arm.stages[0].until)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the rate rises, the same at each fraction."""
        return max(1, round(arms.WARMUP * self.full_steps))


@dataclass(frozen=True)
class Link:
    """A job that trains from the end of `parent`, or from fresh weights, to step `end`."""

    run: Run
    stages: tuple[Stage, ...]
    """Stages that the job trains, or continues. If the parent ends with a stage, that stage comes first: a phase is
    delinked or grown from the phase before it in its own job."""
    end: int
    decay_from: int | None = None
    """Step at which the rate begins to decay to zero at `end`; None for a link of the trunk."""
    parent: "Link | None" = None

    @cached_property
    def key(self) -> str:
        """Eight hexadecimal digits, the uid of the link's job. Equal links have equal keys."""
        content = [self.run.text, self.spec("data"), None if self.parent is None else self.parent.key]
        content += [stage.ties for stage in self.run.arm.stages if stage.ties is not None]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def begin(self) -> int:
        return 0 if self.parent is None else self.parent.end

    def ancestry(self) -> "list[Link]":
        """Return the links that lead to this one, the first one first, and this one."""
        return [*([] if self.parent is None else self.parent.ancestry()), self]

    def job(self, data: str) -> PseudoRealJob:
        """Return the link's job. `data`: folder with the text's tokens."""
        spec = self.spec(data)
        if self.parent is not None:
            spec["checkpoint"]["continueFrom"] = work_folder(NAME, self.parent.key)
        metadata = {"name": NAME, "uid": self.key}
        body = {"apiVersion": "pseudoreal.dev/v1alpha1", "kind": "PseudoRealJob", "metadata": metadata, "spec": spec}
        return PseudoRealJob.from_object(body)

    def spec(self, data: str) -> dict[str, Any]:
        scale = self.run.scale
        model = arms.model(self.run.study, self.run.own_width, scale)
        tokenizer = {"tokenizer": {"type": "File", "path": f"{data}/tokenizer.json"}} if scale.names_tokenizer else {}
        spec = {
            "model": model,
            "data": {
                "path": data,
                "seed": self.run.seed,
                "sources": [{"name": "text", "path": f"{data}/train"}],
                **tokenizer,
                # Losses of whole validation sets are measured apart, many windows at a time.
                "validation": {
                    "everySteps": 1_000_000,
                    "sequences": 1,
                    "sets": [{"name": "validation", "path": f"{data}/validation"}],
                },
            },
            "optimizer": {
                "learningRate": decimal(self._rate),
                "warmupSteps": self.run.warmup_steps,
                **self._schedule(),
            },
            "precision": {"compute": scale.precision},
            "phases": [self._phase(stage, model) for stage in self.stages],
            "checkpoint": {"everySteps": 1_000_000, "mode": "Sync"},
        }
        delink = self._delink()
        return spec | ({"delink": delink} if delink else {})

    @property
    def _rate(self) -> float:
        """Peak rate. A link trains one stage, except where the transition needs the steps before it."""
        is_first = self.end <= self.run.first_stage_end
        return self.run.first_rate if is_first and self.run.first_rate is not None else self.run.rate

    def _delink(self) -> dict[str, Any]:
        arm = self.run.arm
        noise = {"noise": NOISE} if self._copies_experts else {}
        warmup = {"warmupSteps": round(arms.SECOND_WARMUP * self.run.full_steps)} if arm.warms_up_again else {}
        # Jobs of one stage have no transition: arms that begin alike share them.
        return {**noise, **arm.delink, **warmup} if len(self.stages) > 1 else {}

    def _schedule(self) -> dict[str, str]:
        if self.decay_from is None:
            return {"schedule": "Constant"}
        share = (self.end - self.decay_from) / (self.end - self.run.warmup_steps)
        return {"schedule": "WarmupStableDecay", "decayFraction": decimal(share), "finalFraction": "0"}

    def _phase(self, stage: Stage, model: dict[str, Any]) -> dict[str, Any]:
        phase: dict[str, Any] = {
            "name": stage.name,
            "until": {"step": min(self.end, round(self.run.steps * stage.until))},
            "batch": {"sequences": self.run.scale.sequences},
            "activations": {"keep": "All"},
        }
        if self.run.scale.micro_batches > 1:
            # One micro-batch after the other, so that the activations of one are kept.
            phase["batch"]["microBatches"] = self.run.scale.micro_batches
            phase["parallelism"] = {"schedule": "1F1B"}
        if stage.layers != model["layers"]:
            phase["layers"] = stage.layers
        if stage.experts is not None and stage.experts != model["experts"]["count"]:
            phase["experts"] = stage.experts
        if stage.blocks != stage.layers and stage.ties is None:
            parts = {"parts": ["Experts"]} if stage.shares_experts else {}
            phase["sharing"] = {"blocks": stage.blocks, **parts}
        return phase

    @property
    def _copies_experts(self) -> bool:
        return len({stage.experts for stage in self.stages}) > 1


def decays(run: Run, budgets: Sequence[float] = arms.BUDGETS) -> list[Link]:
    """Return the decays of a run, one for each budget, ascending. Their ancestors are the trunk."""
    ends = {round(run.steps * budget * (1 - arms.DECAY)): round(run.steps * budget) for budget in budgets}
    trunk, before, found = None, 0, []
    for cut in sorted({*ends, *_leaves(run, max(ends))}):
        trunk = Link(run, _stages(run, before, cut), cut, parent=trunk)
        if cut in ends:
            end = ends[cut]
            found.append(Link(run, _stages(run, cut, end), end, decay_from=cut, parent=trunk))
        before = cut
    return found


def _leaves(run: Run, last: int) -> set[int]:
    """Return the steps before `last` at which this arm leaves a stage, or an arm that begins alike leaves its first."""
    # The job that measures gradients for the transition also makes the transition.
    measured = arms.MEASURED_STEPS if run.arm.delink.get("optimizerState") == "Measured" else 0
    own = {round(run.steps * stage.until) - measured for stage in run.arm.stages}
    known = run.scale.arms[run.study]
    alike = [arm for arm in known if arm.tuned_as == run.arm.tuned_as and _first(arm) == _first(run.arm)]
    others = {round(run.steps * arm.stages[0].until) for arm in alike}
    if measured:
        others = {step for step in others if step < min(own)}
    return {step for step in own | others if step < last}


def _first(arm: Arm) -> str:
    return arm.stages[0].name


def _stages(run: Run, begin: int, end: int) -> tuple[Stage, ...]:
    """Return the stages that a job from step `begin` to step `end` needs: from the last one that has trained before
    `begin`."""
    ends = [round(run.steps * stage.until) for stage in run.arm.stages]
    first = next(i for i, until in enumerate(ends) if until >= begin)
    last = next(i for i, until in enumerate(ends) if until >= end or i == len(ends) - 1)
    return run.arm.stages[first : last + 1]


def decimal(value: float) -> str:
    """Return the value as the API writes numbers."""
    return f"{value:.9f}".rstrip("0").rstrip(".")
