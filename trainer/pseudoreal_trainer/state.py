"""The state of a phase between memory and checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_api.resolved import PhaseConfig

from pseudoreal_trainer.checkpoint import Checkpoint, CheckpointStore
from pseudoreal_trainer.compute import master_dtype
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.manifest import Manifest
from pseudoreal_trainer.model import Transformer, build_model
from pseudoreal_trainer.optimizer import Optimizer
from pseudoreal_trainer.ranks import Ranks

_FRESH = -1


@dataclass(frozen=True)
class Trained:
    """What training changes."""

    model: Transformer
    optimizer: Optimizer

    def checkpoint(self, manifest: Manifest) -> Checkpoint:
        weights = {name: p.detach().cpu().numpy() for name, p in self.model.named_parameters()}
        return Checkpoint(manifest, weights, self.optimizer.arrays())


def build(config: PhaseConfig, start: Checkpoint | None, device: torch.device) -> Trained:
    """Fresh, or as the checkpoint says."""
    model = build_model(config.model, config.sharing, config.data.seed, master_dtype(config.precision))
    if start is not None:
        load_weights(model, start)
    model.to(device)
    return Trained(model, Optimizer(model, config.optimizer, start.optimizer if start else None))


def load_weights(model: Transformer, checkpoint: Checkpoint) -> None:
    model.load_state_dict({name: torch.from_numpy(array) for name, array in checkpoint.model.items()})


def find_start(config: PhaseConfig, ranks: Ranks) -> Checkpoint | None:
    """The newest sound checkpoint of the phase; None for fresh weights, in the first phase only.

    The first rank chooses, so that all start from the same. Raises TrainingError when a later phase has none.
    """
    store = CheckpointStore(Path(config.work_directory), config.job.uid)
    found = store.load_newest(config.phase) if ranks.is_first else None
    step = ranks.from_first(found.manifest.step if found else _FRESH)
    if step == _FRESH and config.index > 0:
        raise TrainingError(
            f"phase {config.phase} has no checkpoint in {store.folder}: the delink from the phase before has not run"
        )
    if ranks.is_first or step == _FRESH:
        return found
    return store.load(next(m for m in store.committed(config.phase) if m.step == step))


def first_manifest(config: PhaseConfig) -> Manifest:
    """The state before the job's first step."""
    return Manifest(
        job=config.job,
        attempt=config.attempt,
        phase=config.phase,
        phase_index=config.index,
        model=config.model,
        sharing=config.sharing,
        step=0,
        tokens=0,
        global_cursor=0,
        phase_complete=False,
        delinked=False,
        parent=None,
    )
