"""Asynchronous checkpoints: training goes on while a checkpoint is written.

On every rank a thread writes the rank's files. The threads of all ranks then exchange the digests of their files, and
the first rank's thread writes the manifest: the manifest commits the checkpoint.
"""

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from threading import Thread
from typing import Self, TypeVar

import structlog
import torch
import torch.distributed as dist
from pseudoreal_api.quantity import bytes_of
from pseudoreal_api.resolved.config import CheckpointPolicy
from pseudoreal_api.wire.messages import CheckpointCost
from torch import Tensor

from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import FILES, FileDigest, Manifest
from pseudoreal_trainer.checkpoint.pieces import spans_of, tensors_of
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.state.blocks import readable_dtype
from pseudoreal_trainer.engine.worker_thread import WorkerThread
from pseudoreal_trainer.errors import PeerFailed, TrainingError
from pseudoreal_trainer.plan.parts import Part, parts_of
from pseudoreal_trainer.plan.units import Kind
from pseudoreal_trainer.storage.path import StoragePath

_T = TypeVar("_T")
_LAST_SECONDS = 1.0
"""Time limit in seconds of two waits: a failing rank that trains alone waits for the checkpoint in progress; any rank
waits for unfinished files to close."""

log = structlog.get_logger()


class SavingFailed(TrainingError):
    """A checkpoint could not be written; earlier committed checkpoints are intact."""


@dataclass(frozen=True)
class Saved:
    """Committed checkpoint with its cost."""

    manifest: Manifest
    """Manifest of the checkpoint; only the first rank's manifest has tensors and files."""
    seconds: float
    """Seconds from the checkpoint's step to its commit."""
    stall_seconds: float
    """Upper bound on the seconds for which the checkpoint blocked training on this rank."""

    @property
    def cost(self) -> CheckpointCost:
        return CheckpointCost(
            step=self.manifest.step,
            bytes=self.manifest.bytes,
            seconds=self.seconds,
            bytes_per_second=self.manifest.bytes / self.seconds,
            stall_seconds=self.stall_seconds,
        )


_Dtypes = tuple[str, str | None]
"""Names of the dtypes of weights and moments; None: moments have the dtype of the weights."""


class _Files:
    """Files of this rank, opened by the thread that writes them.

    If the volume refuses to open a file, the save fails, as after a failed write; the training step does not.
    """

    def __init__(
        self, folder: StoragePath, rank: int, units: list[list[Part]], dtypes: _Dtypes, *, uses_muon: bool
    ) -> None:
        self._arguments, self._uses_muon = (folder, rank, units, *dtypes), uses_muon

    @cached_property
    def _writer(self) -> RankWriter:
        return RankWriter(*self._arguments, uses_muon=self._uses_muon)

    def write(self, kind: Kind, content: Tensor) -> None:
        self._writer.write(kind, content.view(torch.uint8).numpy())

    def finish(self) -> dict[str, FileDigest]:
        return self._writer.finish()

    def close(self) -> None:
        if "_writer" in vars(self):
            self._writer.close()


@dataclass(frozen=True)
class _Committed:
    manifest: Manifest
    moment: float
    """Time of the commit, in seconds of time.perf_counter."""


@dataclass(frozen=True)
class _Running:
    """A checkpoint in progress."""

    done: Future[_Committed]
    begin: float
    """Time of the start, in seconds of time.perf_counter."""
    stalled: float
    """Seconds that the main thread spent on starting the save."""
    held: float
    """The engine's `capture_wait_seconds` when the save started."""


class Saver:
    """Checkpoints of a phase, one at a time. Every rank has one `Saver` and calls the same methods in the same order.

    Invariant: only the checkpoint thread runs collectives on the group `groups.checkpoint`.
    """

    def __init__(
        self, engine: Engine, store: CheckpointStore, fence: Fence, policy: CheckpointPolicy, start: Manifest | None
    ) -> None:
        """`start`: manifest of the resumed checkpoint; the checkpoint's files have been read and verified. None if no
        checkpoint of this job was resumed."""
        self._engine, self._store, self._fence, self._policy, self._start = engine, store, fence, policy, start
        self._heartbeat = engine.groups.ranks.heartbeat
        self._thread = WorkerThread("checkpoint", self._heartbeat.failure)
        self._running: _Running | None = None
        is_first, layout = engine.groups.ranks.is_first, engine.groups.layout
        # Computed here, before any rank trains: the computation is slow, and its result the same for all checkpoints of
        # the phase.
        self._uses_muon = engine.blueprint.optimizer.algorithm == "Muon"
        self._tensors = (
            tensors_of(layout, engine.blueprint.units, *self._dtypes, uses_muon=self._uses_muon) if is_first else {}
        )
        self._own_names = store.names() if is_first else set()

    def start(self, manifest: Manifest) -> list[Saved]:
        """Start saving the state of the newest step.

        First waits for the previous checkpoint, if that is still being written, and returns the previous checkpoint.
        Raises SavingFailed if the previous checkpoint could not be written.
        """
        before = self.finish()
        self._heartbeat.save_begun()
        begin, held = time.perf_counter(), self._engine.state.capture_wait_seconds
        done = (
            self._start_restating(manifest) if self._is_resumed_checkpoint(manifest) else self._start_writing(manifest)
        )
        stalled = time.perf_counter() - begin
        self._running = _Running(done, begin, stalled, held)
        return before

    def poll(self) -> list[Saved]:
        """Return the checkpoint committed since the last call, if any, without waiting. Raises SavingFailed."""
        return self.finish() if self._running is not None and self._running.done.done() else []

    def finish(self) -> list[Saved]:
        """Wait for the checkpoint in progress, and return that checkpoint; return an empty list if none is in progress.
        Raises SavingFailed."""
        if self._running is None:
            return []
        running, begin = self._running, time.perf_counter()
        self._running = None
        committed = self._heartbeat.join(running.done, self._heartbeat.saving)
        waited = time.perf_counter() - begin
        held = self._engine.state.capture_wait_seconds - running.held
        return [Saved(committed.manifest, committed.moment - running.begin, running.stalled + held + waited)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, *_: object) -> None:
        """Wait until the checkpoint in progress is committed or has failed.

        After an exception, a rank among several does not wait: the commit needs the other ranks, and the other ranks
        may be waiting for this rank. A rank that trains alone waits for `_LAST_SECONDS` only: a hanging volume may be
        the cause of the exception.
        """
        is_alone = self._engine.groups.ranks.world == 1
        if failure is not None and is_alone and self._running is not None:
            wait([self._running.done], _LAST_SECONDS)
            self._heartbeat.failure.add(failure)  # ends the process, if this process is a training rank
        self._thread.close(wait=kind is None or is_alone)

    def _start_writing(self, manifest: Manifest) -> Future[_Committed]:
        engine, groups, ranks = self._engine, self._engine.groups, self._engine.groups.ranks
        if ranks.is_first:
            self._fence.check()
            self._make_folder(manifest)
        ranks.from_first(0)  # also a barrier: no rank goes on before the folder exists
        spans = spans_of(groups.layout, engine.units, ranks.rank)
        spans = {unit: spans[unit] for unit in engine.order_of_updates() if unit in spans}
        parts = [parts_of(engine.units[unit], span) for unit, span in spans.items()]
        folder = self._store.folder / manifest.name
        files = _Files(folder, ranks.rank, parts, self._dtypes, uses_muon=self._uses_muon)
        captured = engine.state.capture(spans, files, bytes_of(self._policy.buffer_bytes))
        return self._thread.submit(lambda: self._write(manifest, files, captured))

    def _is_resumed_checkpoint(self, manifest: Manifest) -> bool:
        """Return whether the manifest describes the resumed checkpoint: no step has been trained since the resume."""
        return self._start is not None and manifest.name == self._start.name

    def _make_folder(self, manifest: Manifest) -> None:
        try:
            self._store.begin(manifest)
        except OSError as error:
            raise _saving_failed(manifest, error) from error

    def _start_restating(self, manifest: Manifest) -> Future[_Committed]:
        """Save the resumed checkpoint again: its files stay, and its manifest is replaced atomically."""
        start = self._start
        assert start is not None, (
            "`_start_restating` is called only if the manifest has the name of the resumed checkpoint"
        )
        kept = {"tensors", "files", "files_version", "link", "delinked", "parent"}
        manifest = manifest.revised(**{name: getattr(start, name) for name in kept})
        return self._thread.submit(lambda: self._commit_on_all_ranks(manifest))

    @property
    def _dtypes(self) -> _Dtypes:
        blueprint = self._engine.blueprint
        dtypes = blueprint.master, readable_dtype(blueprint.moments)
        weights, moments = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return weights, None if moments == weights else moments

    def _write(self, manifest: Manifest, own: _Files, captured: Future[None]) -> _Committed:
        """Write this rank's files and commit. Runs in the checkpoint thread. Collective among the checkpoint threads of
        all ranks."""
        digests, error = _try(lambda: _finish_files(own, captured))
        if error is not None:
            _abandon_files(own)
        # Also after an error: the other ranks wait in this collective.
        files = self._gather_files(digests)
        if files is None:
            raise _saving_failed(manifest, error or "another rank says why") from error or PeerFailed()
        return self._commit_on_all_ranks(manifest.revised(files=files, tensors=self._tensors, link=None))

    def _commit_on_all_ranks(self, manifest: Manifest) -> _Committed:
        error = _try(lambda: self._commit(manifest))[1] if self._engine.groups.ranks.is_first else None
        # Every rank learns whether the commit succeeded, so that no rank goes on with a checkpoint that does not exist.
        if not self._agree_on_success(error is None):
            if isinstance(error, TrainingError):
                raise error
            raise _saving_failed(manifest, error or "the first rank says why") from error or PeerFailed()
        self._heartbeat.save_done()
        return _Committed(manifest, time.perf_counter())

    def _commit(self, manifest: Manifest) -> None:
        self._fence.check()
        self._own_names.add(manifest.name)
        (self._store.restate if self._is_resumed_checkpoint(manifest) else self._store.commit)(manifest)
        try:
            # Name the verified checkpoints: pruning could otherwise keep newer, unverified checkpoints in their place.
            verified = [manifest.name, *([] if self._start is None else [self._start.name])]
            self._store.prune(self._policy.keep_last, self._policy.keep_every, verified, self._fence.check)
            self._store.sweep(self._own_names, self._fence.check)
        except (OSError, TrainingError) as error:
            # Training goes on: the new checkpoint itself is committed.
            log.warning("old_checkpoints_stay", error=str(error))

    def _gather_files(self, own: dict[str, FileDigest] | None) -> dict[str, FileDigest] | None:
        """Return file name -> digest for the files of all ranks; empty on ranks other than the first. None on all ranks
        if a rank could not write its files."""
        mine, ranks = _encode(own), self._engine.groups.ranks
        everyone = torch.empty(ranks.world * len(mine), dtype=torch.uint8)
        if self._engine.groups.checkpoint is None:
            everyone = mine
        else:
            with self._heartbeat.saving.waiting("gathers the files of all ranks"):
                dist.all_gather_into_tensor(everyone, mine, group=self._engine.groups.checkpoint)
        sizes = everyone.view(-1, _SHA256_BYTES + _SIZE_BYTES)[:, _SHA256_BYTES:]
        if not bool(sizes.any(dim=1).all()):
            return None
        return _decode(everyone) if ranks.is_first else {}

    def _agree_on_success(self, mine: bool) -> bool:
        failures = torch.tensor(int(not mine))
        if self._engine.groups.checkpoint is not None:
            with self._heartbeat.saving.waiting("agrees on the commit of the checkpoint"):
                dist.all_reduce(failures, group=self._engine.groups.checkpoint)
        return int(failures) == 0


def _saving_failed(manifest: Manifest, why: Exception | str) -> SavingFailed:
    remedy = " (enlarge the volume, or lower spec.checkpoint.keepLast)" if _is_full(why) else ""
    text = f"checkpoint {manifest.name} could not be written: {why}{remedy}"
    return SavingFailed(f"{text}; those that were committed before it are intact")


def _is_full(why: Exception | str) -> bool:
    return isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT)


def _abandon_files(files: _Files) -> None:
    """Close unfinished files in a new thread; wait at most `_LAST_SECONDS` for the thread.

    The failed storage may hang or retry, and must not delay the report of the error.
    """
    closing = Thread(target=files.close, name="gives files up", daemon=True)
    closing.start()
    closing.join(_LAST_SECONDS)


def _finish_files(files: _Files, captured: Future[None]) -> dict[str, FileDigest]:
    captured.result()
    return files.finish()


def _try(act: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


_SHA256_BYTES, _SIZE_BYTES = 32, 8


def _encode(files: dict[str, FileDigest] | None) -> Tensor:
    """Return the digests and sizes of a rank's files as bytes; all zeros if the rank could not write them."""
    if files is None:
        return torch.zeros(len(FILES) * (_SHA256_BYTES + _SIZE_BYTES), dtype=torch.uint8)
    parts = [bytes.fromhex(file.sha256) + file.size.to_bytes(_SIZE_BYTES, "little") for file in files.values()]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _decode(everyone: Tensor) -> dict[str, FileDigest]:
    """Return file name -> digest for the files of all ranks, from the concatenated results of `_encode`."""
    content, record = everyone.numpy().tobytes(), _SHA256_BYTES + _SIZE_BYTES
    found = {}
    for number, begin in enumerate(range(0, len(content), record)):
        rank, kind = divmod(number, len(FILES))
        size = begin + _SHA256_BYTES
        found[FILES[kind].format(rank)] = FileDigest(
            sha256=content[begin:size].hex(), size=int.from_bytes(content[size : begin + record], "little")
        )
    return found
