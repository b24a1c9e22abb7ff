"""Run the saver thread's part of a save on one rank; the other ranks are simulated."""

import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pseudoreal_api.resolved.config import CheckpointPolicy
from pseudoreal_api.resolved.layers import blocks_of_layers
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import FILES, FileDigest, Manifest
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.runtime.heartbeat import Heartbeat
from pseudoreal_trainer.training.saving import Saver

LAYERS = 80
MODEL = Model(
    layers=LAYERS,
    hidden_size=512,
    attention=Attention(heads=32, key_value_heads=8),
    sequence_length=64,
    vocabulary_size=1000,
    feed_forward=FeedForward(size=2048, activation="SwiGLU"),
)
SHARING = Sharing(blocks=LAYERS)
UNITS = units_of(MODEL, SHARING)


def layout_of(ranks: int) -> Layout:
    """Return a layout in which every rank holds a shard of every block."""
    blocks = blocks_of_layers(SHARING, LAYERS)
    return Layout(layer_blocks=blocks, pipeline=1, data=ranks, micro_batches=1, sharding="Full")


def files_of(ranks: int, digest: str = "0" * 64, size: int = 1) -> dict[str, FileDigest]:
    return {name.format(rank): FileDigest(sha256=digest, size=size) for rank in range(ranks) for name in FILES}


@dataclass(frozen=True)
class _Ranks:
    rank: int
    world: int
    heartbeat: Heartbeat

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class _Groups:
    ranks: _Ranks
    layout: Layout
    checkpoint: object


@dataclass(frozen=True)
class _Blueprint:
    units: Any = UNITS
    master: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32


@dataclass(frozen=True)
class _EngineState:
    capture_wait_seconds: float = 0.0


@dataclass(frozen=True)
class _Engine:
    groups: _Groups
    blueprint: _Blueprint = _Blueprint()
    state: _EngineState = _EngineState()


@dataclass(frozen=True)
class _OwnFiles:
    def finish(self) -> dict[str, FileDigest]:
        return files_of(1)

    def close(self) -> None: ...


def saver_of(store: CheckpointStore, rank: int, ranks: int, policy: CheckpointPolicy, monkeypatch: Any) -> Saver:
    """Return the saver of a rank. The simulated other ranks write as many bytes, with the same digests, and
    never fail."""

    def gathered(everyone: torch.Tensor, mine: torch.Tensor, group: object) -> None:  # noqa: ARG001
        everyone.copy_(mine.repeat(ranks))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gathered)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    engine = _Engine(_Groups(_Ranks(rank, ranks, Heartbeat()), layout_of(ranks), object()))
    return Saver(cast(Engine, engine), store, Fence(store.work_directory, 1), policy, None)


def save(saver: Saver, manifest: Manifest) -> float:
    """Run the saver thread's work that follows the writing of this rank's files.

    Return its user CPU time in seconds; during nearly all of that time the thread holds the GIL.
    """
    captured: Future[None] = Future()
    captured.set_result(None)
    saver._store.begin(manifest)
    return _seconds(lambda: saver._write(manifest, cast(Any, _OwnFiles()), captured))


def _seconds(act: Callable[[], object]) -> float:
    found: list[float] = []

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
        act()
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def keep(store: CheckpointStore, manifest: Manifest, text: str, steps: range) -> None:
    """Write committed checkpoints of these steps, with manifests like `manifest`; `text` is the JSON of `manifest`."""
    assert isinstance(store.folder, Path)
    said = f'"step": {manifest.step},'
    assert text.count(said) == 1
    head, behind = text.split(said)
    for step in steps:
        folder = store.folder / f"{manifest.phase}-{step:08d}"
        folder.mkdir(parents=True)
        # A sparse file: the list of shards is a hole. So the test writes no gigabytes, and readers must not read the
        # hole.
        with (folder / "manifest.json").open("w") as file:
            file.write(head + f'"step": {step},' + behind[:2000])
            file.seek(len(text) - 100)
            file.write(behind[-100:])
