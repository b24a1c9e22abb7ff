"""Runs the engine on an emulated machine: training steps, captures, evaluations, a probe, and the end."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.gradients import Agreement
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS, Kind
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Race
from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.late import LateMachine, LateNetwork, Schedule
from tests.unit.trainer.engine.races.support.machine import CPU, Machine
from tests.unit.trainer.engine.races.support.network import Network
from tests.unit.trainer.engine.races.support.recording import RecordingMachine, RecordingNetwork
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

    work: Callable[[Machine, Path], list[float]]
    """Returns numbers that depend on the order of the device's work."""
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
    numbers: list["Numbers"]
    """[ranks]"""
    failure: Exception | None = None
    """Failure of a run without a wait."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Rank -> peak of the bytes that are allocated on its device; of runs that execute late."""
    executed: int = 0
    """Number of entries that were executed; of runs that execute late."""


@dataclass
class Numbers:
    """Numbers that a scenario computes on one rank."""

    losses: list[float] = field(default_factory=list)
    """[steps]"""
    agreements: list[Agreement] = field(default_factory=list)
    """[steps]"""
    others: list[float] = field(default_factory=list)
    """Losses of evaluations, or numbers of a component."""
    measured: list[Any] = field(default_factory=list)
    """[measuring steps]"""
    state: list[str] = field(default_factory=list)
    """Digests of the weights and moments after each step."""


@dataclass(frozen=True)
class Late:
    """A device that executes late."""

    schedule: Schedule
    queues: int = 32
    """Hardware queues of a device."""
    patience: float = 60.0
    """Seconds without a launch after which a run in which nothing can be executed ends."""


class _Sink:
    """Sink that reads what it gets."""

    def __init__(self) -> None:
        self._hashes = {kind: sha256() for kind in KINDS}

    @property
    def digest(self) -> str:
        return sha256(b"".join(content.digest() for content in self._hashes.values())).hexdigest()

    def write(self, kind: Kind, content: Tensor) -> None:
        self._hashes[kind].update(content.view(torch.uint8).numpy().tobytes())


def run(scenario: Scenario, folder: Path, removed: Site | None = None, late: Late | None = None) -> Outcome:
    """Run a scenario. `removed`: wait that orders nothing in this run, which ends with the step of the first race.
    `late`: None for a device that executes at once, whose accesses are checked for races."""
    machine: RecordingMachine | LateMachine = RecordingMachine(scenario.device, removed)
    network: Network = RecordingNetwork(machine, scenario.world)
    if late is not None:
        machine = LateMachine(
            scenario.device, removed, schedule=late.schedule, queues=late.queues, patience=late.patience
        )
        network = LateNetwork(machine, scenario.world)
    numbers = [Numbers() for _ in range(scenario.world)]
    outcome = Outcome([], machine.reached, numbers)
    threads = torch.get_num_threads()
    torch.set_num_threads(scenario.threads)

    def work(number: int) -> None:
        if isinstance(scenario, Component):
            numbers[number].others.extend(scenario.work(machine, folder / str(number)))
        else:
            _train(scenario, machine, folder / str(number), numbers[number])

    try:
        with patch.object(running, "process_groups_of", create_process_groups):
            Emulation(machine, network).run(work, scenario.world)
        if isinstance(machine, LateMachine):
            machine.end()
    except Exception as error:
        if late is None or removed is None:
            raise
        outcome.failure = error
    finally:
        torch.set_num_threads(threads)
    outcome.races = [*machine.detector.races]
    if isinstance(machine, LateMachine):
        outcome.peaks, outcome.executed = machine.peaks, machine.executed
    return outcome


def _train(scenario: TrainedCase, machine: Machine, folder: Path, numbers: Numbers) -> None:
    case, number = scenario.case, machine.rank.number
    engine = running.make_engine(case, Ranks(number, case.world, machine.rank.device), folder)
    engine.trace.is_recording = scenario.traces
    spans = spans_of(case.layout, engine.units, number)
    spans = {unit: spans[unit] for unit in engine.order_of_updates() if unit in spans}
    saved: tuple[Future[None], _Sink] | None = None
    for step in range(STEPS):
        _step(engine, case, step, numbers)
        if scenario.sets_state:
            _set_state(engine)
        if saved is not None:
            _finish(*saved, numbers)
        sink = _Sink()
        saved = engine.state.capture(spans, sink, _RING), sink
        if step > 0:
            evaluated = engine.evaluate(_batch(engine, case, 0), case.micro_batches)
            numbers.others.extend(evaluated.values())
        # One rank cannot tell alone whether the others continue.
        if machine.removed is not None and case.world == 1 and machine.detector.races:
            break
    assert saved is not None, "there are steps"
    _finish(*saved, numbers)
    engine.close()


def _finish(saved: Future[None], sink: _Sink, numbers: Numbers) -> None:
    saved.result()
    numbers.state.append(sink.digest)


def _step(engine: Engine, case: Case, step: int, numbers: Numbers) -> None:
    """Train a step."""
    tokens, targets = tokens_of(case), targets_of(case, step)
    probe = engine.new_probe(case.following) if case.following else None
    training = Training(tokens, RATE, stop=False, ignored=tokens - targets)
    agreement = engine.train(_batch(engine, case, step), training, step, probe)
    if probe is not None:
        numbers.measured.append(probe.result())
    numbers.agreements.append(agreement)
    numbers.losses.append(agreement.loss_sum / targets)


def _set_state(engine: Engine) -> None:
    engine.state.wait_for_updates()
    for unit in engine.order_of_updates():
        zeros = torch.zeros(len(engine.state.shard_range(unit)), dtype=engine.blueprint.master)
        engine.state.put(unit, UnitState(dict.fromkeys(KINDS, zeros), 0))


def _batch(engine: Engine, case: Case, step: int) -> CaseBatch:
    return CaseBatch(case, step, engine.groups.ranks.rank % case.data, CPU)
