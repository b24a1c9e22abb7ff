"""A checkpoint that is saved under any layout loads under any other: bit for bit the same state, and the same training
from there."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.origin import Complete, FreshStart, Origin, find_origin
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, store_of
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.data.stream import Stream
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.phase import train_step
from pseudoreal_trainer.training.saving import Saver
from pseudoreal_trainer.training.start import fill, first_progress, open_engine

from tests.support.depth import DEPTH
from tests.support.forked import run_ranks

SAVED, END = 3, 5
"""Steps after which the state is saved."""


def _layout(workers: int, pipeline: int = 1, **phase: Any) -> dict[str, Any]:
    names = ("schedule", "stateSharding", "replicas", "expertRanks", "tensorRanks")
    fields = {key: phase.pop(key) for key in names if key in phase}
    return {"workers": workers, "parallelism": {"pipeline": pipeline, **fields}, **phase}


LAYOUTS = {
    "one rank": _layout(1),
    "one rank, disk": _layout(1, offload={"home": "Disk", "window": 1}),
    "data 2, full, host": _layout(2, stateSharding="Full", offload={"home": "Host"}),
    "pipeline 2, 1f1b, disk": _layout(2, 2, schedule="1F1B", offload={"home": "Disk"}),
    "data 3, optimizer": _layout(3, stateSharding="Optimizer"),
    "2 replicas x data 2, full, disk": _layout(4, stateSharding="Full", replicas=2, offload={"home": "Disk"}),
    "tensor 2 x data 2, full, disk": _layout(4, tensorRanks=2, stateSharding="Full", offload={"home": "Disk"}),
    "pipeline 2 x data 2, full, host": _layout(4, 2, schedule="GPipe", stateSharding="Full", offload={"home": "Host"}),
}

SPREAD = {
    "experts over 2, host": _layout(2, expertRanks=2, stateSharding="None", offload={"home": "Host"}),
    "experts over 2, 2 holders, full, disk": _layout(
        4, expertRanks=2, stateSharding="Full", offload={"home": "Disk", "window": 1}
    ),
    "experts over 2 in 3 groups, host": _layout(2, expertRanks=2, offload={"home": "Host", "expertGroups": 3}),
    "pipeline 2 x experts over 2": _layout(4, 2, expertRanks=2, stateSharding="None", schedule="1F1B"),
}
WHOLE = {
    "data 2, whole, host": _layout(2, stateSharding="None", offload={"home": "Host"}),
    "pipeline 2, disk": _layout(2, 2, offload={"home": "Disk", "window": 1}),
}
LAYOUTS_OF_EXPERTS = LAYOUTS | SPREAD | WHOLE
MIXTURE = {"count": 6, "prototypes": 2, "capacityFactor": "0.75"}
OF_THE_MIXTURE = ["one rank, disk", "data 2, full, host", "pipeline 2, 1f1b, disk", *SPREAD]
BALANCED = {"type": "TopK", "count": 5, "topK": {"perToken": 2, "score": "Sigmoid", "biasUpdateRate": "0.02"}}
OF_THE_BALANCED = OF_THE_MIXTURE[:2]
OF_MUON = ["one rank, disk", "experts over 2, host", *WHOLE]
OF_THE_ROUNDED = ["one rank, disk", "data 2, full, host", "pipeline 2, 1f1b, disk"]


@dataclass(frozen=True)
class Task:
    """A training run from step `SAVED` of a folder, or from the start, to the end; it saves at both steps."""

    config: PhaseConfig
    source: Path | None


def _rank(rank: int, world: int, tasks: list[Task]) -> None:
    for task in tasks:
        _do(task, Ranks(rank, world, torch.device("cpu")))


def _do(task: Task, ranks: Ranks) -> None:
    config, work = task.config, Path(task.config.work_directory)
    origin: Origin | Complete = FreshStart()
    if task.source is not None:
        there = config.model_copy(update={"work_directory": str(task.source)})
        origin = find_origin(there, store_of(there), ranks)
    assert not isinstance(origin, Complete)
    corpus = load_corpus(config.data, config.model.sequence_length)
    with open_engine(config, phase_layout(config, "cpu"), ranks) as engine:
        fill(engine, config, origin)
        store, fence = CheckpointStore(work, config.job.uid), Fence(work, 1)
        with Saver(engine, store, fence, config.checkpoint, None) as saver:
            stream = Stream(corpus.train, config.model.sequence_length, config.data.seed)
            progress = first_progress(config, origin)
            if not isinstance(origin, FreshStart):
                saver.start(progress.manifest(config, corpus.identity))
            while progress.step < END:
                progress.advance(train_step(config, stream, engine, progress), config, left_out=[])
                if progress.step in (SAVED, END):
                    saver.start(progress.manifest(config, corpus.identity))
            saver.finish()


def _run(tasks: list[Task]) -> None:
    for world in sorted({task.config.ranks for task in tasks}):
        mine = [task for task in tasks if task.config.ranks == world]
        if world == 1:
            _rank(0, 1, mine)
        else:
            run_ranks(_rank, world, world, mine)


def _config(name: str, job_body: dict[str, Any], config: Any, work: str) -> PhaseConfig:
    first, second = job_body["spec"]["phases"]
    kept = {key: first[key] for key in ("name", "sharing", "until")}
    # Four data ranks have a sequence of each micro-batch.
    job_body["spec"]["phases"][0] = kept | {"batch": {"sequences": 8, "microBatches": 2}} | LAYOUTS_OF_EXPERTS[name]
    second["until"] = {"step": 100}
    found: PhaseConfig = config(0, work)
    return found


def _work(saved: str, loaded: str) -> str:
    return f"{[*LAYOUTS_OF_EXPERTS].index(saved)}-{[*LAYOUTS_OF_EXPERTS].index(loaded)}"


@pytest.fixture
def stores(job_body: dict[str, Any], config: Any, tmp_path: Path) -> dict[str, Path]:
    """Work directories by name, `saved-loaded` and `saved`."""
    return _stores([*LAYOUTS], job_body, config, tmp_path)


@pytest.fixture
def stores_of_experts(job_body: dict[str, Any], config: Any, tmp_path: Path) -> dict[str, Path]:
    job_body["spec"]["model"]["experts"] = MIXTURE
    return _stores(OF_THE_MIXTURE, job_body, config, tmp_path)


@pytest.fixture
def stores_of_balanced_experts(job_body: dict[str, Any], config: Any, tmp_path: Path) -> dict[str, Path]:
    job_body["spec"]["model"]["experts"] = BALANCED
    return _stores(OF_THE_BALANCED, job_body, config, tmp_path)


@pytest.fixture(params=["BFloat16", "Float8"])
def stores_of_rounded_moments(
    request: pytest.FixtureRequest, job_body: dict[str, Any], config: Any, tmp_path: Path
) -> dict[str, Path]:
    job_body["spec"]["optimizer"] = {"moments": request.param}
    return _stores(OF_THE_ROUNDED, job_body, config, tmp_path)


@pytest.fixture
def stores_of_muon(job_body: dict[str, Any], config: Any, tmp_path: Path) -> dict[str, Path]:
    job_body["spec"]["model"]["experts"] = MIXTURE
    job_body["spec"]["optimizer"]["algorithm"] = "Muon"
    return _stores(OF_MUON, job_body, config, tmp_path)


def _stores(layouts: list[str], job_body: dict[str, Any], config: Any, tmp_path: Path) -> dict[str, Path]:
    job_body["spec"]["phases"][0] |= {"sharing": {"blocks": 2}, "until": {"step": 90}}
    first = [Task(_config(name, job_body, config, name), None) for name in layouts]
    _run(first)
    # Only the earlier of the two checkpoints is gone on from.
    for name in layouts:
        later = tmp_path / name / "checkpoints" / f"pseudo-{END:08d}"
        later.rename(tmp_path / name / "later")
    again = [
        Task(_config(loaded, job_body, config, _work(saved, loaded)), tmp_path / saved)
        for saved, loaded in _pairs(layouts)
    ]
    _run(again)
    for name in layouts:
        (tmp_path / name / "later").rename(tmp_path / name / "checkpoints" / f"pseudo-{END:08d}")
    return {path.name: path for path in tmp_path.iterdir()}


def _pairs(layouts: list[str]) -> list[tuple[str, str]]:
    """Return pairs of the layout that saves and the layout that loads: all pairs with `--deep`; else each layout saves
    for itself and for one to three others."""
    pairs = product(enumerate(layouts), repeat=2)
    near = {0, 1, 3, 6}
    return [(a, b) for (i, a), (j, b) in pairs if DEPTH.is_deep or (j - i) % len(layouts) in near]


def _at(work: Path, step: int) -> Reader:
    store = CheckpointStore(work, "11111111-2222")
    manifest = store.whole(next(head for head in store.committed() if head.step == step))
    store.verify(manifest)
    return store.reader(manifest)


def test_pairs_of_layouts(stores: dict[str, Path]) -> None:
    _assert_all_pairs([*LAYOUTS], stores)
    one, other = (_at(stores[name], SAVED).manifest for name in ("one rank", "pipeline 2 x data 2, full, host"))
    assert len(one.files) == 2
    assert len(other.files) == 8, "every rank writes"


def test_pairs_of_layouts_with_experts(stores_of_experts: dict[str, Path]) -> None:
    """All layouts train identically: an expert's capacity does not depend on the number of sequences of a rank."""
    _assert_all_pairs(OF_THE_MIXTURE, stores_of_experts)
    first, *others = (_at(stores_of_experts[name], END) for name in OF_THE_MIXTURE)
    assert first.shape("blocks.1.experts.up.weight") == (6, 32, 16)
    assert first.shape("blocks.1.router.weight") == (6, 16)
    for other in others:
        _assert_same_end(first, other, exact=False)


def test_pairs_of_layouts_with_biases_that_balance_experts(stores_of_balanced_experts: dict[str, Path]) -> None:
    _assert_all_pairs(OF_THE_BALANCED, stores_of_balanced_experts)
    first, other = (_at(stores_of_balanced_experts[name], END) for name in OF_THE_BALANCED)
    assert first.tensor("blocks.1.experts.balancing_bias").any()
    _assert_same_end(first, other, exact=False)


def test_pairs_of_layouts_with_rounded_moments(stores_of_rounded_moments: dict[str, Path]) -> None:
    """Rounded alike after a resume, too: the bits are those of a number of updates, which a checkpoint contains."""
    _assert_all_pairs(OF_THE_ROUNDED, stores_of_rounded_moments)
    first, *others = (_at(stores_of_rounded_moments[name], END) for name in OF_THE_ROUNDED)
    assert {tensor.moment_dtype for tensor in first.manifest.tensors.values()} == {"bfloat16"}
    for other in others:
        _assert_same_end(first, other, exact=False)


def test_pairs_of_layouts_with_muon(stores_of_muon: dict[str, Path]) -> None:
    _assert_all_pairs(OF_MUON, stores_of_muon)
    first, *others = (_at(stores_of_muon[name], END) for name in OF_MUON)
    without = {name for name, tensor in first.manifest.tensors.items() if not tensor.has_second_moment}
    assert len(without) == 2 * (4 + 2)
    assert not any(first.tensor(name, "second_moment").any() for name in without)
    assert first.tensor("blocks.1.experts.up.weight", "first_moment").any()
    for other in others:
        _assert_same_end(first, other, exact=False)


def _assert_all_pairs(layouts: list[str], stores: dict[str, Path]) -> None:
    for saved, loaded in _pairs(layouts):
        source, again = _at(stores[saved], SAVED), _at(stores[_work(saved, loaded)], SAVED)
        for kind in KINDS:
            before, after = source.whole(kind), again.whole(kind)
            assert before.keys() == after.keys()
            assert all(before[name].tobytes() == after[name].tobytes() for name in before), (saved, loaded, kind)
        for field in ("step", "global_cursor", "random", "updates"):
            assert getattr(source.manifest, field) == getattr(again.manifest, field)
        _assert_same_end(_at(stores[saved], END), _at(stores[_work(saved, loaded)], END), exact=saved == loaded)


def _assert_same_end(uninterrupted: Reader, resumed: Reader, *, exact: bool) -> None:
    for kind in KINDS:
        for name, expected in uninterrupted.whole(kind).items():
            found = resumed.tensor(name, kind)
            if exact:
                assert found.tobytes() == expected.tobytes()
            else:
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
