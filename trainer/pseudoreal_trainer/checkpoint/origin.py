"""Where a phase begins: anew, or from which checkpoint, of its own job or of those that it continues."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.checkpoint.lineage import continued_stores
from pseudoreal_trainer.checkpoint.manifest import Head, Manifest, checkpoint_name
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.storage.path import ObjectPath
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

log = structlog.get_logger()


@dataclass(frozen=True)
class Anew:
    """Fresh weights, or those that spec.checkpoint.startFrom names: the job's first phase has no checkpoint yet."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint of this job in this phase. The oldest that there can be in a later phase is the delink's."""

    checkpoint: Reader


@dataclass(frozen=True)
class Continued:
    """A checkpoint of another job in the phase of the same name; spec.checkpoint.continueFrom leads to it."""

    checkpoint: Reader


@dataclass(frozen=True)
class Complete:
    """The phase has ended, with this checkpoint: there is nothing to begin."""

    checkpoint: Reader


Origin = Anew | Resumed | Continued


class Ranks(Protocol):
    """What the ranks that train together tell each other. Every method is a collective: all ranks call it."""

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
    """0 for the job's own, 1 for that of the one that it continues, and so on."""


def find_origin(config: PhaseConfig, store: CheckpointStore, ranks: Ranks) -> Origin | Complete:
    """The newest sound checkpoint of the phase, or fresh weights; the same answer on every rank.

    The first rank lists and chooses, and all verify together, each some of the files, and ask for no others. `store`:
    the job's own. Raises TrainingError when a later
    phase has no checkpoint, CorruptCheckpoint when all are corrupt, and InvalidJobError when
    spec.checkpoint.continueFrom names none that fits.
    """
    stores = [store, *continued_stores(config)]
    found = _newest_first(stores, config.phase) if ranks.is_first else []
    # Collectives, in this order on every rank: how many candidates there are; then of each its store, and those of
    # `_sound`, until one is sound. What follows depends on nothing but their results.
    count, which = ranks.from_first(len(found)), 0
    for turn in range(count):
        chosen = found[turn] if ranks.is_first else None
        which = ranks.from_first(chosen.store if chosen else 0)
        manifest = _sound(stores[which], chosen.head if chosen else None, config.phase, ranks)
        if manifest is not None:
            return _from(config, Reader(manifest, stores[which].folder, awaits_files=True), own=which == 0)
    if count:
        raise stores[which].all_corrupt(config.phase, [candidate.head.name for candidate in found])
    return _anew(config, stores)


def _from(config: PhaseConfig, checkpoint: Reader, *, own: bool) -> Resumed | Continued | Complete:
    if not own:
        _refuse_another_model(config, checkpoint.manifest)
        return Continued(checkpoint)
    return Complete(checkpoint) if checkpoint.manifest.ends_phase(config) else Resumed(checkpoint)


def _anew(config: PhaseConfig, stores: Sequence[CheckpointStore]) -> Anew:
    """Raises where the phase must not begin with fresh weights."""
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
    return Anew()


def _newest_first(stores: Sequence[CheckpointStore], phase: str) -> list[_Candidate]:
    """The newest come first; of two with the same step, the job's own.

    Where the job's own phase began at another step than another job's, that one's goes back to other weights.
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


def _sound(store: CheckpointStore, chosen: Head | None, phase: str, ranks: Ranks) -> Manifest | None:
    """The checkpoint that the first rank has `chosen`, if its files are what they should be.

    The others know nothing of it but what they are told: what they would find by themselves may be stale. Every rank
    calls this. Collectives: step, digest of the manifest, those of `_are_there`; if they are, how many ranks found
    faults. What a manifest with this digest says is the same on every rank, and so is whether it makes sense.
    """
    step = ranks.from_first(0 if chosen is None else chosen.step)
    digest = ranks.digest_from_first("" if chosen is None else store.digest(chosen))
    try:
        manifest = store.as_seen(checkpoint_name(phase, step), digest)
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", error=str(error))
        return None
    if not _are_there(store, manifest, ranks):
        return None
    faulty = _has_fault(lambda: store.verify(manifest, ranks.rank, ranks.world))
    return None if ranks.total(int(faulty)) else manifest


def _are_there(store: CheckpointStore, manifest: Manifest, ranks: Ranks) -> bool:
    """Whether the files have their sizes, once this rank sees those that it verifies. Object storage shows what it has:
    there, to verify them tells.

    Collectives: how many ranks miss files; if some do, whether the first rank finds that they are gone. It looks at all
    of them only then: a rank that misses one may have a stale view.
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
