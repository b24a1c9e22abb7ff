"""Runs cases on the engine: all cases with one number of ranks in the same processes, which start only once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pseudoreal_trainer.checkpoint.pieces import spans_of
from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.engine_state import UnitState
from pseudoreal_trainer.engine.evaluation import generate
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import ExpertLoad
from pseudoreal_trainer.engine.state.blocks import moment_dtype
from pseudoreal_trainer.model.initialization import initial_weights
from pseudoreal_trainer.model.modules import views
from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.units import KINDS, Kind, Parameter, Unit, units_of
from torch import Tensor

from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support.cases import END, PROMPTS, RATE, SAMPLING, SEED, WRITTEN, Case
from tests.unit.trainer.engine.support.process_groups import needed_groups, process_groups_of
from tests.unit.trainer.engine.support.reference import batch_of, part_of, targets_of, tokens_of

_LIMIT_SECONDS = 1800.0
"""Limit for all cases of one number of ranks together, which take a minute and a half on two processors."""
_wanted: dict[Case, None] = {}
_observed: set[Case] = set()
_writing: set[Case] = set()


@dataclass
class Result:
    """Result of a case on one rank."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """On the first rank only."""
    first_moments: dict[str, Tensor] = field(default_factory=dict)
    """On the first rank only."""
    moved: list[dict[str, int]] = field(default_factory=list)
    """For each step, link -> bytes."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Trace events of the steps, without the evaluation."""
    captured: dict[Kind, dict[int, tuple[int, Tensor]]] = field(default_factory=dict)
    """Kind -> unit -> start of this rank's part in the unit's flat vector, and the part."""
    measured: list[LayerGradients] = field(default_factory=list)
    """One entry per step."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[int, ...]] = field(default_factory=list)
    """Units without an update, for each step."""
    loads: list[ExpertLoad | None] = field(default_factory=list)
    """One entry per step."""
    evaluation: float = 0.0
    """Sum of the losses of the first batch with the last weights; on the head's rank only."""
    written: list[list[int]] = field(default_factory=list)
    """Tokens after each of PROMPTS, with the last weights; for cases in which they are wanted."""

    def assert_weights(self, expected: Mapping[str, Tensor]) -> None:
        assert self.weights.keys() == expected.keys()
        for name, weights in expected.items():
            torch.testing.assert_close(self.weights[name], weights, rtol=0, atol=1e-12)

    def assert_first_moments(self, expected: Mapping[str, Tensor]) -> None:
        """Compare the first moments; as sums of gradients, they are numbers below 1 here."""
        for name, moments in expected.items():
            torch.testing.assert_close(self.first_moments[name], moments, rtol=0, atol=1e-13)


class CaseBatch:
    def __init__(self, case: Case, step: int, data_rank: int, device: torch.device) -> None:
        # Neighbouring data ranks have the same sequences, and compute different parts of them.
        of_sequence = case.context_ranks * case.tensor_ranks
        part, parts = data_rank // of_sequence, case.data // of_sequence
        self._part = part_of(batch_of(case, step), part, parts).to(device)

    def shape(self, micro_batch: int) -> tuple[int, int]:
        return len(self._part[micro_batch]), self._part.shape[2] - 1

    def tokens(self, micro_batch: int) -> Tensor:
        return self._part[micro_batch]


def want(cases: Iterable[Case], *, events: bool = False, written: bool = False) -> None:
    """Request results of cases from the fixture `engine_results`. `events`: with trace events, which take much memory.
    `written`: with the tokens after PROMPTS."""
    found = [*cases]
    _wanted.update(dict.fromkeys(found))
    _observed.update(found if events else ())
    _writing.update(found if written else ())


def sound(found: Mapping[Case, list[Result]], case: Case) -> Result:
    """Return the first rank's result; assert that every rank knows the same losses."""
    assert all(result.losses == found[case][0].losses for result in found[case])
    return found[case][0]


def run_wanted(folder: Path) -> dict[Case, list[Result]]:
    """Run all cases that test files of this session request, each case once."""
    return run_cases([*_wanted], folder)


def run_cases(cases: list[Case], folder: Path, device: str = "cpu") -> dict[Case, list[Result]]:
    """Return case -> result of each rank. `device`: cuda gives each rank a GPU of its own."""
    worlds: dict[int, list[Case]] = {}
    # Cases that need the same process groups follow each other, so that the groups are created once.
    for case in sorted(cases, key=lambda case: str(needed_groups(case.layout))):
        worlds.setdefault(case.world, []).append(case)
    found: dict[Case, list[Result]] = {}
    for world, group in worlds.items():
        _spawn(world, group, folder, device)
        ranks = [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        for index, case in enumerate(group):
            found[case] = [results[index] for results in ranks]
            bring_together(case, found[case])
    return found


def _spawn(world: int, cases: list[Case], folder: Path, device: str) -> None:
    if world == 1:
        _rank(0, world, cases, folder, device, _observed, _writing)
    else:
        backend = "nccl" if device == "cuda" else "gloo"
        run_ranks(
            _rank,
            world,
            world,
            cases,
            folder,
            device,
            _observed & {*cases},
            _writing & {*cases},
            backend=backend,
            limit=_LIMIT_SECONDS,
        )


def _rank(
    rank: int, world: int, cases: list[Case], folder: Path, device: str, observed: set[Case], writing: set[Case]
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    ranks = Ranks(rank, world, torch.device(device, rank) if device == "cuda" else torch.device(device))
    results = [_named(case, ranks, folder, writes=case in writing) for case in cases]
    for case, result in zip(cases, results, strict=True):
        if case not in observed:
            result.events.clear()
    torch.save(results, folder / f"{world}-{rank}.pt")


def _named(case: Case, ranks: Ranks, folder: Path, *, writes: bool) -> Result:
    try:
        return run_case(case, ranks, folder, writes=writes)
    except Exception as error:
        # The other ranks wait for this rank, so it must end, which ends them too.
        raise RuntimeError(f"case {case.name}") from error


def run_case(case: Case, ranks: Ranks, folder: Path, *, compiled: bool = False, writes: bool = False) -> Result:
    engine = make_engine(case, ranks, folder, compiled=compiled)
    result = Result()
    data_rank = ranks.rank % case.data
    for step in range(case.steps):
        batch = CaseBatch(case, step, data_rank, ranks.device)
        tokens, targets = tokens_of(case), targets_of(case, step)
        probe = engine.new_probe(case.following) if case.following else None
        agreement = engine.train(batch, Training(tokens, RATE, stop=False, ignored=tokens - targets), step, probe)
        if probe is not None:
            result.measured.append(probe.result())
        engine.state.wait_for_updates()
        result.losses.append(agreement.loss_sum / targets)
        result.skipped.append(agreement.skipped)
        result.loads.append(agreement.load)
        result.moved.append({str(link): size for link, size in engine.trace.moved.items()})
    result.events = list(engine.trace.events)
    result.state_bytes = {str(what): size for what, size in engine.state.memory_report().state.items()}
    result.evaluation = sum(engine.evaluate(CaseBatch(case, 0, data_rank, ranks.device), case.micro_batches).values())
    if writes:
        result.written = generate(engine, PROMPTS, WRITTEN, case.model.sequence_length, SAMPLING, at_once=2)
    result.captured = captured(engine)
    engine.close()
    if ranks.world == 1:
        bring_together(case, [result])
    return result


class _Memory:
    """Sink that keeps the content of a capture."""

    def __init__(self) -> None:
        self.streams: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}

    def write(self, kind: Kind, content: Tensor) -> None:
        self.streams[kind].append(content.clone())


def captured(engine: Engine) -> dict[Kind, dict[int, tuple[int, Tensor]]]:
    """Return this rank's part of the state in a checkpoint."""
    spans, memory = spans_of(engine.groups.layout, engine.units, engine.groups.ranks.rank), _Memory()
    engine.state.capture(spans, memory, buffer_bytes=1 << 12).result()
    found: dict[Kind, dict[int, tuple[int, Tensor]]] = {}
    for kind, stream in memory.streams.items():
        flat = torch.cat([torch.empty(0, dtype=engine.blueprint.master), *stream])
        # Muon keeps no second moments of the first elements of a unit.
        firsts = [engine.state._store.states[unit].shard.first_of(kind) for unit in spans]
        begins = [min(max(span.start, first), span.stop) for span, first in zip(spans.values(), firsts, strict=True)]
        parts = flat.split([span.stop - begin for span, begin in zip(spans.values(), begins, strict=True)])
        found[kind] = {unit: (begin, part) for unit, begin, part in zip(spans, begins, parts, strict=True)}
    return found


def bring_together(case: Case, results: list[Result]) -> None:
    """Give the first rank the whole weights and moments."""
    results[0].weights, results[0].first_moments = (_together(case, results, k) for k in ("weights", "first_moment"))


def _together(case: Case, results: list[Result], kind: Kind) -> dict[str, Tensor]:
    """Return parameter -> values, from the parts of all ranks."""
    whole: dict[str, Tensor] = {}
    found: dict[tuple[int, Unit], list[tuple[int, Tensor]]] = {}
    for rank, result in enumerate(results):
        own = units_of_rank(case.layout, units_of(case.model, case.sharing), rank)
        for index, part in result.captured[kind].items():
            found.setdefault((index, own[index]), []).append(part)
    for (_, unit), parts in found.items():
        flat = torch.cat([part for _, part in sorted(parts, key=_begin)])
        shapes = [parameter.shape for parameter in unit.parameters]
        for parameter, view in zip(unit.parameters, views(flat, shapes), strict=True):
            # Elements that no rank holds stay NaN.
            tensor = whole.setdefault(parameter.name, torch.full(parameter.whole, torch.nan, dtype=flat.dtype))
            own_part = _part_of(tensor, parameter)
            assert own_part.isnan().all() or own_part.equal(view), f"all ranks have the same {parameter.name}"
            own_part.copy_(view)
    return whole


def _part_of(tensor: Tensor, parameter: Parameter) -> Tensor:
    """Return a view of the parameter's part of a whole tensor."""
    if (own := parameter.slice) is not None:
        return tensor.chunk(own.count, own.axis)[own.index]
    return tensor.view(-1)[parameter.begin : parameter.begin + parameter.numel].view(parameter.shape)


def _begin(part: tuple[int, Tensor]) -> int:
    return part[0]


def make_engine(case: Case, ranks: Ranks, folder: Path, *, compiled: bool = False) -> Engine:
    master = {"float64": torch.float64}.get(case.precision, torch.float32)
    compute = getattr(torch, case.precision)
    end = END if case.documents else None
    units = units_of(case.model, case.sharing)
    blueprint = Blueprint(
        model=case.model,
        optimizer=case.optimizer,
        units=units,
        master=master,
        compute=compute,
        moments=moment_dtype(case.moments, master),
        gradients=torch.bfloat16 if case.gradients == "BFloat16" else master,
        compiled=compiled,
        offload_directory=folder / "disk",
        seed=SEED,
        end_of_document=end,
        products=case.products,
    )
    trace = Trace(ranks.rank)
    trace.is_recording = True
    engine = Engine(blueprint, process_groups_of(case.layout, ranks), trace)
    for index, unit in enumerate(engine.units):
        weights = initial_weights(unit, case.layout.unit_of_model(index), case.model, SEED, master)
        if engine.state.has(index):
            engine.state.put(index, UnitState.fresh(weights, engine.state.shard_range(index)))
    return engine
