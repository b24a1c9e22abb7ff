"""Runs the engine on an emulated machine: training steps, captures, evaluations, a probe, and the end."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS, Kind
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Race
from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.machine import CPU, Machine
from tests.unit.trainer.engine.races.support.network import Network
from tests.unit.trainer.engine.races.support.sites import Site
from tests.unit.trainer.engine.support import running
from tests.unit.trainer.engine.support.cases import RATE, Case
from tests.unit.trainer.engine.support.reference import targets_of, tokens_of
from tests.unit.trainer.engine.support.running import CaseBatch

STEPS = 3
_RING = 1 << 12
"""Bytes of the ring of captures: less than a unit, so that chunks overwrite each other."""


@dataclass(frozen=True)
class TrainedCase:
    """Three steps of a case, a capture after each, and evaluations after the second and the third."""

    case: Case
    device: str = "cuda"
    """torch's type of the device; on cpu no device is emulated."""
    threads: int = 1
    """Threads of an update on the host."""
    traces: bool = False
    sets_state: bool = False
    """Whether the state is set after each step, once all updates are done."""

    @property
    def world(self) -> int:
        return self.case.world


@dataclass(frozen=True)
class Component:
    """A program that uses a part of the engine by itself, in an order that no plan of today has."""

    work: Callable[[Machine, Path], None]
    device: str = "cuda"
    threads: int = 1
    world: int = 1


Scenario = TrainedCase | Component


@dataclass
class Outcome:
    """Outcome of a scenario on all ranks."""

    races: list[Race]
    reached: set[Site]
    """Waits that were executed."""
    losses: list[list[float]] = field(default_factory=list)
    """[ranks][steps]"""


class _Sink:
    """Sink that reads what it gets."""

    def __init__(self) -> None:
        self.last: tuple[Kind, Tensor] | None = None

    def write(self, kind: Kind, content: Tensor) -> None:
        self.last = kind, content.clone()


def run(scenario: Scenario, folder: Path, removed: Site | None = None) -> Outcome:
    """Run a scenario. `removed`: wait that orders nothing in this run, which ends with the step of the first race."""
    machine = Machine(scenario.device, removed)
    emulation = Emulation(machine, Network(machine, scenario.world))
    losses: list[list[float]] = [[] for _ in range(scenario.world)]
    threads = torch.get_num_threads()
    torch.set_num_threads(scenario.threads)

    def work(number: int) -> None:
        if isinstance(scenario, Component):
            scenario.work(machine, folder / str(number))
        else:
            _train(scenario, machine, folder / str(number), losses[number])

    try:
        with patch.object(running, "process_groups_of", create_process_groups):
            emulation.run(work, scenario.world)
    finally:
        torch.set_num_threads(threads)
    return Outcome([*machine.detector.races], machine.reached, losses)


def _train(scenario: TrainedCase, machine: Machine, folder: Path, losses: list[float]) -> None:
    case, number = scenario.case, machine.rank.number
    engine = running.make_engine(case, Ranks(number, case.world, machine.rank.device), folder)
    engine.trace.is_recording = scenario.traces
    spans = spans_of(case.layout, engine.units, number)
    spans = {unit: spans[unit] for unit in engine.order_of_updates() if unit in spans}
    saved: Future[None] | None = None
    for step in range(STEPS):
        losses.append(_step(engine, case, step))
        if scenario.sets_state:
            _set_state(engine)
        if saved is not None:
            saved.result()
        saved = engine.state.capture(spans, _Sink(), _RING)
        if step > 0:
            engine.evaluate(_batch(engine, case, 0), case.micro_batches)
        # One rank cannot tell alone whether the others continue.
        if machine.removed is not None and case.world == 1 and machine.detector.races:
            break
    assert saved is not None, "there are steps"
    saved.result()
    engine.close()


def _step(engine: Engine, case: Case, step: int) -> float:
    """Train a step and return its loss."""
    tokens, targets = tokens_of(case), targets_of(case, step)
    probe = engine.new_probe(case.following) if case.following else None
    training = Training(tokens, RATE, stop=False, ignored=tokens - targets)
    agreement = engine.train(_batch(engine, case, step), training, step, probe)
    if probe is not None:
        probe.result()
    return agreement.loss_sum / targets


def _set_state(engine: Engine) -> None:
    engine.state.wait_for_updates()
    for unit in engine.order_of_updates():
        zeros = torch.zeros(len(engine.state.shard_range(unit)), dtype=engine.blueprint.master)
        engine.state.put(unit, UnitState(dict.fromkeys(KINDS, zeros), 0))


def _batch(engine: Engine, case: Case, step: int) -> CaseBatch:
    return CaseBatch(case, step, engine.groups.ranks.rank % case.data, CPU)
