"""Phases of a job: their configurations, what they share, and the memory that was predicted for them. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.layers import number_of_blocks, sets_of_experts
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pydantic import JsonValue, ValidationError

from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes, placed_layout
from pseudoreal_trainer.plan.memory.homes import activation_peaks
from pseudoreal_trainer.plan.memory.tiers import Tiers, resident_bytes
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.report.steps import Steps
from pseudoreal_trainer.runtime.history import HistoryEntry


@dataclass(frozen=True)
class Shape:
    """Numbers of layers, and of what they own or share."""

    layers: int
    blocks: int
    experts: int
    """Experts of a layer; 0 without experts."""
    sets_of_experts: int

    @classmethod
    def of(cls, model: Model, sharing: Sharing) -> "Shape | None":
        """Return the shape; None if the blocks do not divide the layers, as a file that was edited may say."""
        try:
            blocks, sets = number_of_blocks(sharing, model.layers), len(sets_of_experts(sharing, model))
        except ValueError:
            return None
        return cls(model.layers, blocks, model.experts.count if model.experts else 0, sets)

    def __str__(self) -> str:
        blocks = f"{self.layers} layers, {self.blocks} {'block' if self.blocks == 1 else 'blocks'}"
        return f"{blocks}, {self.experts} experts a layer, {self.sets_of_experts} sets" if self.experts else blocks


@dataclass(frozen=True)
class PhaseFacts:
    name: str
    shape: Shape | None
    """None: neither a configuration nor a checkpoint of the phase is known."""
    config: PhaseConfig | None
    """Newest configuration with which the phase started; None: not recorded."""
    first_step: int | None
    """First step that was trained; None: no step is known."""
    last_step: int | None


@dataclass(frozen=True)
class Transition:
    """Border between two phases."""

    step: int
    """Last step of the earlier phase."""
    phase: str
    """Name of the phase that begins."""
    kind: str
    """phase, delink or growth."""
    text: str


def phases_of(
    steps: Steps, heads: Sequence[Head], history: Sequence[HistoryEntry], known_configs: Sequence[PhaseConfig] = ()
) -> list[PhaseFacts]:
    """Return all phases in `steps`, `heads`, `history` and `known_configs`, in the order of the job. `known_configs`:
    configurations from outside the history, which has priority."""
    configs = {config.phase: config for config in known_configs} | _configs(history)
    shapes = {head.phase: Shape.of(head.model, head.sharing) for head in heads}
    shapes |= {name: Shape.of(config.model, config.sharing) for name, config in configs.items()}
    trained = dict(_trained(steps))
    order = {head.phase: head.phase_index for head in heads} | {name: each.index for name, each in configs.items()}
    known = sorted(order, key=lambda name: order[name])
    names = dict.fromkeys([*known, *(name for name in trained if name not in order)])
    return [PhaseFacts(name, shapes.get(name), configs.get(name), *trained.get(name, (None, None))) for name in names]


def _configs(history: Sequence[HistoryEntry]) -> dict[str, PhaseConfig]:
    """Return the newest configuration of each phase."""
    found: dict[str, PhaseConfig] = {}
    for entry in reversed(history):
        is_wanted = entry.event == "Started" and entry.phase not in found
        if is_wanted and (config := _config(entry.config)) is not None:
            found.setdefault(config.phase, config)
    return found


def _config(given: JsonValue) -> PhaseConfig | None:
    """Return a recorded configuration; None if this release cannot read it."""
    try:
        return PhaseConfig.model_validate_json(json.dumps(given), extra="ignore")
    except ValidationError:
        return None


def _trained(steps: Steps) -> list[tuple[str, tuple[int, int]]]:
    """Return (name of a phase, its first and last step) for each phase with steps."""
    found = []
    for index, name in enumerate(steps.phases):
        own = steps.step[steps.phase == index]
        if len(own):
            found.append((name, (int(own[0]), int(own[-1]))))
    return found


def transitions_of(phases: Sequence[PhaseFacts]) -> list[Transition]:
    """Return the borders between phases that were trained, with what changes there."""
    trained = [phase for phase in phases if phase.first_step is not None]
    return [_transition(before, after) for before, after in pairwise(trained)]


def _transition(before: PhaseFacts, after: PhaseFacts) -> Transition:
    assert after.first_step is not None, "only phases with steps have borders"
    kind, changes = _changes(before.shape, after.shape)
    return Transition(after.first_step - 1, after.name, kind, ", ".join([f"phase {after.name}", *changes]))


def _changes(before: Shape | None, after: Shape | None) -> tuple[str, list[str]]:
    if before is None or after is None:
        return "phase", []
    growth = [
        f"{was} to {now} {what}"
        for was, now, what in (
            (before.layers, after.layers, "layers"),
            (before.experts, after.experts, "experts"),
        )
        if was != now
    ]
    if growth:
        return "growth", [f"growth from {each}" for each in growth]
    delink = [
        f"{was} to {now} {what}"
        for was, now, what in (
            (before.blocks, after.blocks, "blocks"),
            (before.sets_of_experts, after.sets_of_experts, "sets of experts"),
        )
        if was != now
    ]
    return ("delink", [f"delink from {each}" for each in delink]) if delink else ("phase", [])


_MOST_PASSES = 20_000
"""Most passes of a step (layers times micro-batches) for which memory is predicted: a file may name any number."""


def is_plannable(config: PhaseConfig, most_passes: int) -> bool:
    """Return whether planning takes a bounded time: a recorded configuration is not checked again."""
    layers, parallelism = config.model.layers, config.parallelism
    return (
        parallelism.layout == "Given"
        and layers * config.batch.micro_batches <= most_passes
        and layers * config.offload.expert_groups <= most_passes
        and parallelism.pipeline <= layers + 2
    )


def predicted_memory(config: PhaseConfig, device: Device) -> Tiers | None:
    """Return the bytes that `pseudoreal plan` predicts for rank 0, activations included; None if it cannot.

    On a CPU, the bytes of the device are bytes of the host.
    """
    if not is_plannable(config, _MOST_PASSES):
        return None
    try:
        sizes = phase_sizes(config, device)
        peaks = activation_peaks(fixed_layout(config, sizes), sizes)
        layout = placed_layout(config, sizes, peaks)
        return resident_bytes(layout, sizes, 0) + peaks[0]
    except (InvalidJobError, ValueError, ArithmeticError, AssertionError, IndexError, KeyError):
        # A recorded configuration is not checked again: an edited one may contradict itself.
        return None


def device_of(config: PhaseConfig, steps: Steps) -> Device:
    return "accelerator" if config.gpus or steps.has("device_bytes") else "cpu"
