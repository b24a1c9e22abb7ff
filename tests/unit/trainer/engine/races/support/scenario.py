"""Runs a case of the engine on an emulated machine: training steps, captures, an evaluation, a probe, and the end."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import Kind
from torch import Tensor

from tests.unit.trainer.engine.races.support.detector import Race
from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.machine import Machine
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
class Scenario:
    """A case, and the machine that it runs on."""

    case: Case
    device: str = "cuda"
    """Type of the emulated device; cpu: none."""
    threads: int = 1
    """Threads of an update on the host."""
    traces: bool = False

    @property
    def name(self) -> str:
        others = [f"on {self.device}"] if self.device != "cuda" else []
        others += [f"{self.threads} threads"] if self.threads > 1 else []
        return " ".join([self.case.name, *others, *(["traced"] if self.traces else [])])


@dataclass
class Outcome:
    races: list[Race]
    reached: set[Site]
    operations: int
    losses: list[list[float]] = field(default_factory=list)
    """[ranks][steps]"""


class _Sink:
    """Sink that reads what it gets."""

    def write(self, kind: Kind, content: Tensor) -> None:
        content.clone()


def run(scenario: Scenario, folder: Path, removed: Site | None = None) -> Outcome:
    """Run a scenario, without the effect of a wait if one is removed."""
    case = scenario.case
    machine = Machine(scenario.device, removed)
    emulation = Emulation(machine, Network(machine, case.world))
    losses: list[list[float]] = [[] for _ in range(case.world)]
    threads = torch.get_num_threads()
    torch.set_num_threads(scenario.threads)
    try:
        with patch.object(running, "process_groups_of", create_process_groups):
            emulation.run(lambda rank: _run_rank(scenario, machine, rank, folder / str(rank), losses[rank]), case.world)
    finally:
        torch.set_num_threads(threads)
    return Outcome([*machine.detector.races], machine.reached, machine.detector.operations, losses)


def _run_rank(scenario: Scenario, machine: Machine, number: int, folder: Path, losses: list[float]) -> None:
    case = scenario.case
    ranks = Ranks(number, case.world, machine.rank.device)
    engine = running.make_engine(case, ranks, folder)
    engine.trace.is_recording = scenario.traces
    data_rank = number % case.data
    spans = spans_of(case.layout, engine.units, number)
    spans = {unit: spans[unit] for unit in engine.order_of_updates() if unit in spans}
    saved: Future[None] | None = None
    for step in range(STEPS):
        tokens, targets = tokens_of(case), targets_of(case, step)
        probe = engine.new_probe(case.following) if case.following else None
        training = Training(tokens, RATE, stop=False, ignored=tokens - targets)
        agreement = engine.train(CaseBatch(case, step, data_rank, torch.device("cpu")), training, step, probe)
        losses.append(agreement.loss_sum / targets)
        if probe is not None:
            probe.result()
        if saved is not None:
            saved.result()
        saved = engine.state.capture(spans, _Sink(), _RING)
        if step == 1:
            engine.evaluate(CaseBatch(case, 0, data_rank, torch.device("cpu")), case.micro_batches)
    if saved is not None:
        saved.result()
    engine.close()
