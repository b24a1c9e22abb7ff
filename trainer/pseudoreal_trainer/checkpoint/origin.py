"""Where a phase starts: from fresh weights, or from a checkpoint of its own job or of a job that it continues."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.checkpoint.lineage import continued_stores
from pseudoreal_trainer.checkpoint.manifest import Head, Manifest, checkpoint_name
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.path import ObjectPath

log = structlog.get_logger()


@dataclass(frozen=True)
class FreshStart:
    """Start of the first phase without a checkpoint: from fresh weights, or from the weights named by
    spec.checkpoint.startFrom."""


@dataclass(frozen=True)
class Resumed:
    """Start from a checkpoint of this job in this phase. In phases after the first, the oldest checkpoint is written by
    the delink."""

    checkpoint: Reader


@dataclass(frozen=True)
class Continued:
    """Start from a checkpoint of another job, in the phase of the same name, found through
    spec.checkpoint.continueFrom."""

    checkpoint: Reader


@dataclass(frozen=True)
class Complete:
    """The phase has already ended with this checkpoint: nothing is left to train."""

    checkpoint: Reader


Origin = FreshStart | Resumed | Continued


class Ranks(Protocol):
    """Communication between the ranks that train together. Every method is a collective: all ranks call it.

    A protocol, so that this package does not import torch.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    def from_first(self, value: int, /) -> int: ...
    def digest_from_first(self, digest: str, /) -> str: ...
    def total(self, value: int, /) -> int: ...


@dataclass(frozen=True)
class _Candidate:
    head: Head
    store: int
    """Index of the store: 0 for the job's own, 1 for the job that it continues, and so on."""


def find_origin(config: PhaseConfig, store: CheckpointStore, ranks: Ranks) -> Origin | Complete:
    """Return the newest verified checkpoint of the phase, or fresh weights. Collective; the result is the same on every
    rank.

    The first rank lists and chooses. All ranks verify together; each reads only its own part of the files. `store`: the
    job's own checkpoints.

    Raises TrainingError if a later phase has no checkpoint, CorruptCheckpoint if all checkpoints are corrupt, and
    InvalidJobError if no checkpoint of spec.checkpoint.continueFrom fits.
    """
    stores = [store, *continued_stores(config)]
    found = _newest_first(stores, config.phase) if ranks.is_first else []
    # Collectives, in this order on every rank: the number of candidates; then for each candidate its store, and the
    # collectives of `_verify`, until a candidate is verified. Control flow depends only on their results.
    count, which = ranks.from_first(len(found)), 0
    for turn in range(count):
        chosen = found[turn] if ranks.is_first else None
        which = ranks.from_first(chosen.store if chosen else 0)
        manifest = _verify(stores[which], chosen.head if chosen else None, config.phase, ranks)
        if manifest is not None:
            return _origin_at(config, Reader(manifest, stores[which].folder, awaits_files=True), own=which == 0)
    if count:
        raise stores[which].all_corrupt(config.phase, [candidate.head.name for candidate in found])
    return _start_fresh(config, stores)


def _origin_at(config: PhaseConfig, checkpoint: Reader, *, own: bool) -> Resumed | Continued | Complete:
    if not own:
        _refuse_another_model(config, checkpoint.manifest)
        _refuse_missing_moments(config, checkpoint.manifest)
        return Continued(checkpoint)
    return Complete(checkpoint) if checkpoint.manifest.ends_phase(config) else Resumed(checkpoint)


def _start_fresh(config: PhaseConfig, stores: Sequence[CheckpointStore]) -> FreshStart:
    """Return a fresh start. Raises TrainingError or InvalidJobError if the phase must not start from fresh weights."""
    own, *continued = stores
    if config.index > 0:
        raise TrainingError(
            f"phase {config.phase} has no checkpoint in {own.folder}: the delink from the phase before has not run"
        )
    if continued and not any(head.phase == config.phase for store in continued for head in store.heads()):
        raise InvalidJobError(
            f"spec.checkpoint.continueFrom: {continued[0].folder} holds no checkpoint of phase {config.phase}; name the"
            " folder of a job with this phase, as JOB-UID8, in spec.checkpoint.storage"
        )
    return FreshStart()


def _newest_first(stores: Sequence[CheckpointStore], phase: str) -> list[_Candidate]:
    """Return the candidates, newest first; for equal steps, the job's own checkpoint first.

    If the job has checkpoints of its own in the phase, a checkpoint of a continued job counts only if the phase started
    at the same step in both jobs: otherwise the checkpoint descends from other weights.
    """
    own, *continued = stores
    found = [_Candidate(head, 0) for head in own.candidates(phase)]
    begins = {candidate.head.phase_begin for candidate in found}
    for which, store in enumerate(continued, 1):
        others = store.candidates(phase)
        fit = [head for head in others if not begins or head.phase_begin in begins]
        found += [_Candidate(head, which) for head in fit]
        if others and not fit:
            theirs = others[0].phase_begin
            log.warning("continued_phase_began_elsewhere", phase=phase, folder=str(store.folder), step=theirs,
                        own_steps=sorted(begins))  # fmt: skip
    return sorted(found, key=lambda candidate: (-candidate.head.step, candidate.store))


def _refuse_another_model(config: PhaseConfig, manifest: Manifest) -> None:
    for field, now, then in (
        ("model", config.model, manifest.model),
        (f"phases[{config.phase}].sharing", config.sharing, manifest.sharing),
    ):
        if now != then:
            raise InvalidJobError(
                f"spec.{field} is {now.to_json()}, but that of checkpoint {manifest.name}, which"
                f" spec.checkpoint.continueFrom leads to, is {then.to_json()}; make them the same"
            )


def _refuse_missing_moments(config: PhaseConfig, manifest: Manifest) -> None:
    if config.optimizer.algorithm == "AdamW" and not all(one.has_second_moment for one in manifest.tensors.values()):
        raise InvalidJobError(
            f"spec.optimizer.algorithm is AdamW, but checkpoint {manifest.name}, which spec.checkpoint.continueFrom"
            " leads to, was trained with Muon and has no second moments of the matrices; set algorithm Muon"
        )


def _verify(store: CheckpointStore, chosen: Head | None, phase: str, ranks: Ranks) -> Manifest | None:
    """Return the checkpoint `chosen` by the first rank, if its files are intact. Collective: every rank calls it.

    Other ranks use only the data broadcast by the first rank: their own listing may be stale. Collectives: step, digest
    of the manifest, then the collectives of `_files_present`; if that is True, the number of ranks that found faults.
    The manifest with this digest is the same on every rank, so all ranks agree on whether it is valid."""
    step = ranks.from_first(0 if chosen is None else chosen.step)
    digest = ranks.digest_from_first("" if chosen is None else store.digest(chosen))
    try:
        manifest = store.manifest_when_visible(checkpoint_name(phase, step), digest)
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", error=str(error))
        return None
    if not _files_present(store, manifest, ranks):
        return None
    faulty = _has_fault(lambda: store.verify(manifest, ranks.rank, ranks.world))
    return None if ranks.total(int(faulty)) else manifest


def _files_present(store: CheckpointStore, manifest: Manifest, ranks: Ranks) -> bool:
    """Return False if files are missing on the first rank or have another size. Otherwise wait until this rank sees the
    files that it verifies, and return True. Always True for object storage: it is consistent, so the verification
    itself finds missing files.

    Collectives: the number of ranks that miss files; if it is not 0, whether files are missing on the first rank too.
    Only then does the first rank check all files: a rank that misses a file may have a stale view.
    """
    if isinstance(store.folder, ObjectPath):
        return True
    missing = _has_fault(lambda: store.check_sizes(manifest, ranks.rank, ranks.world))
    if not ranks.total(int(missing)):
        return True
    gone = ranks.is_first and _has_fault(lambda: store.check_sizes(manifest))
    if ranks.from_first(int(gone)):
        return False
    store.await_files(manifest, ranks.rank, ranks.world)
    return True


def _has_fault(check: Callable[[], None]) -> bool:
    try:
        check()
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", error=str(error))
        return True
    return False
