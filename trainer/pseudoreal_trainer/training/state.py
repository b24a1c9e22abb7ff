"""The first state of a phase: fresh, or from a checkpoint, of whatever layout that was saved in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from torch import Tensor

from pseudoreal_trainer.checkpoint.lineage import continued_stores
from pseudoreal_trainer.checkpoint.manifest import Manifest, Random, checkpoint_name
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import (
    CheckpointStore,
    CorruptCheckpoint,
    manifests_in,
    store_of,
)
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.engine import Engine, UnitState
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.model.initial import initial_weights
from pseudoreal_trainer.model.transformer import Transformer
from pseudoreal_trainer.plan.parts import parts_of
from pseudoreal_trainer.plan.units import KINDS, Kind, Unit

log = structlog.get_logger()


def fill(engine: Engine, config: PhaseConfig, start: Reader | None) -> None:
    """Fresh, or as the checkpoint says; each rank reads only what it holds."""
    for index, unit in enumerate(engine.units):
        if engine.has(index):
            extent = engine.extent(index)
            engine.put(index, _fresh(engine, config, index, extent) if start is None else _loaded(unit, extent, start))


def load_weights(model: Transformer, checkpoint: Reader) -> None:
    model.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.whole().items()})


@dataclass(frozen=True)
class Start:
    """`own`: not of the job that this one continues."""

    checkpoint: Reader
    own: bool


def find_start(config: PhaseConfig, ranks: Ranks) -> Start | None:
    """The newest sound checkpoint of the phase, of the job itself or of those that it continues; None for fresh
    weights, in the first phase only.

    The ranks verify it together, each some of its files. Raises TrainingError when a later phase has none, and
    InvalidJobError when spec.checkpoint.continueFrom names none that fits.
    """
    stores = [store_of(config), *continued_stores(config)]
    own, continued = stores[0], stores[1:]
    found = _newest_first(own, continued, config.phase) if ranks.is_first else []
    count = ranks.from_first(len(found))
    for place in range(count):
        which = ranks.from_first(found[place][1] if ranks.is_first else 0)
        manifest = _sound(stores[which], found[place][0] if ranks.is_first else None, config.phase, ranks)
        if manifest is not None:
            if stores[which] is not own:
                _refuse_another_model(config, manifest)
            return Start(stores[which].reader(manifest), own=stores[which] is own)
    if count:
        raise stores[which].all_corrupt(config.phase, [manifest.name for manifest, _ in found])
    if config.index > 0:
        raise TrainingError(
            f"phase {config.phase} has no checkpoint in {own.folder}: the delink from the phase before has not run"
        )
    if continued and not any(m.phase == config.phase for store in continued for m in manifests_in(store.folder)):
        raise InvalidJobError(
            f"spec.checkpoint.continueFrom: {continued[0].folder} holds no checkpoint of phase {config.phase}; name the"
            " folder of a job with this phase, as JOB-UID8, below spec.checkpoint.path"
        )
    return None


def first_manifest(config: PhaseConfig, corpus: CorpusIdentity | None = None) -> Manifest:
    """The state before the job's first step."""
    return Manifest(
        job=config.job,
        attempt=config.attempt,
        phase=config.phase,
        phase_index=config.index,
        model=config.model,
        sharing=config.sharing,
        random=Random(seed=config.data.seed),
        corpus=corpus,
        step=0,
        tokens=0,
        global_cursor=0,
        phase_complete=False,
        delinked=False,
        parent=None,
    )


def _newest_first(own: CheckpointStore, continued: list[CheckpointStore], phase: str) -> list[tuple[Manifest, int]]:
    """With each 0 for the job's own, 1 for the one's that it continues, and so on; of two with the same step its own.

    Where the job's own phase began at another step than another job's, that one's goes back to other weights.
    """
    found = [(manifest, 0) for manifest in own.candidates(phase)]
    begins = {manifest.phase_begin for manifest, _ in found}
    for which, store in enumerate(continued, 1):
        others = store.candidates(phase)
        fit = [m for m in others if not begins or m.phase_begin in begins]
        found += [(manifest, which) for manifest in fit]
        if others and not fit:
            theirs = others[0].phase_begin
            log.warning("continued_phase_began_elsewhere", phase=phase, folder=str(store.folder), step=theirs,
                        own_steps=sorted(begins))  # fmt: skip
    return sorted(found, key=lambda entry: (-entry[0].step, entry[1]))


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


def _sound(store: CheckpointStore, chosen: Manifest | None, phase: str, ranks: Ranks) -> Manifest | None:
    """The checkpoint that the first rank has `chosen`, if its files are what they should be. The others know nothing
    of it but what they are told: what they would find by themselves may be stale."""
    step = ranks.from_first(0 if chosen is None else chosen.step)
    digest = ranks.digest_from_first("" if chosen is None else store.digest(chosen))
    fault: CorruptCheckpoint | None = None
    if chosen is not None:
        fault = _fault(lambda: store.check_sizes(chosen))
    if ranks.from_first(int(fault is not None)):
        return None
    manifest = chosen or store.as_seen(checkpoint_name(phase, step), digest)
    fault = _fault(lambda: store.verify(manifest, ranks.rank, ranks.world))
    faults = ranks.sum_(torch.tensor(int(fault is not None), device=ranks.device))
    return manifest if int(faults.item()) == 0 else None


def _fault(check: Callable[[], None]) -> CorruptCheckpoint | None:
    try:
        check()
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", error=str(error))
        return error
    return None


def _fresh(engine: Engine, config: PhaseConfig, index: int, extent: range) -> UnitState:
    unit = engine.units[index]
    weights = initial_weights(unit, index, config.model.layers, config.data.seed, engine.master_dtype)
    return UnitState.fresh(weights, extent)


def _loaded(unit: Unit, extent: range, start: Reader) -> UnitState:
    return UnitState(
        {kind: _vector(unit, extent, start, kind) for kind in KINDS}, start.updates(unit.parameters[0].name)
    )


def _vector(unit: Unit, extent: range, start: Reader, kind: Kind) -> Tensor:
    """[length of the extent]; behind the unit's end, zeros."""
    parts = parts_of(unit, extent)
    read: list[NDArray[Any]] = [start.read(part.name, kind, part.begin, part.end) for part in parts]
    found = torch.zeros(len(extent), dtype=getattr(torch, start.dtype))
    for part, array in zip(parts, read, strict=True):
        offset = part.offset - extent.start
        found[offset : offset + len(array)] = torch.from_numpy(array)
    return found
