"""The state of a phase between the engine and checkpoints, unit by unit."""

from pathlib import Path

import torch
from pseudoreal_api.resolved import PhaseConfig

from pseudoreal_trainer.checkpoint import FIRST_MOMENT, SECOND_MOMENT, STEP, Checkpoint, CheckpointStore, Saving
from pseudoreal_trainer.engine.engine import Engine, UnitState
from pseudoreal_trainer.engine.state import Kind
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.initial import initial_weights
from pseudoreal_trainer.manifest import Manifest
from pseudoreal_trainer.model import Transformer
from pseudoreal_trainer.plan.units import Unit
from pseudoreal_trainer.ranks import Ranks
from pseudoreal_trainer.tensor_file import Form

_FRESH = -1
_MOMENTS: tuple[tuple[str, Kind], ...] = ((FIRST_MOMENT, "first_moment"), (SECOND_MOMENT, "second_moment"))


def fill(engine: Engine, config: PhaseConfig, start: Checkpoint | None) -> None:
    """Fresh, or as the checkpoint says."""
    for index, unit in enumerate(engine.units):
        if engine.has(index):
            engine.put(index, _fresh(engine, config, index) if start is None else _loaded(unit, start))


def save(engine: Engine, store: CheckpointStore, manifest: Manifest) -> Manifest:
    """Commits a checkpoint. Every rank calls this; the first one writes, a unit at a time."""
    engine.settle()
    if not engine.writes:
        for index in range(len(engine.units)):
            engine.collect(index)
        return manifest
    model, optimizer = _forms(engine)
    with store.begin(manifest, model, optimizer) as saving:
        for index, unit in enumerate(engine.units):
            state = engine.collect(index)
            assert state is not None, "the first rank gets every unit"
            _write(saving, unit, state)
        return saving.commit()


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


def _fresh(engine: Engine, config: PhaseConfig, index: int) -> UnitState:
    weights = initial_weights(engine.units[index], index, config.model.layers, config.data.seed, engine.master_dtype)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return UnitState({"weights": weights, "first_moment": zeros, "second_moment": zeros}, torch.zeros(()))


def _loaded(unit: Unit, checkpoint: Checkpoint) -> UnitState:
    names = [parameter.name for parameter in unit.parameters]
    weights = {name: torch.from_numpy(checkpoint.model[name]) for name in names}
    moments = {
        kind: {name: torch.from_numpy(checkpoint.optimizer[f"{name}.{key}"]) for name in names}
        for key, kind in _MOMENTS
    }
    steps = torch.tensor(float(checkpoint.optimizer[f"{names[0]}.{STEP}"]))
    return UnitState({"weights": weights, **moments}, steps)


def _forms(engine: Engine) -> tuple[dict[str, Form], dict[str, Form]]:
    """Of the two files."""
    dtype = str(engine.master_dtype).removeprefix("torch.")
    shapes = {parameter.name: parameter.shape for unit in engine.units for parameter in unit.parameters}
    model = {name: Form(shape, dtype) for name, shape in shapes.items()}
    optimizer = {
        f"{name}.{key}": Form((), "float32") if key == STEP else Form(shape, dtype)
        for name, shape in shapes.items()
        for key in (FIRST_MOMENT, SECOND_MOMENT, STEP)
    }
    return model, optimizer


def _write(saving: Saving, unit: Unit, state: UnitState) -> None:
    for parameter in unit.parameters:
        name = parameter.name
        saving.model.write(name, state.vectors["weights"][name].numpy())
        for key, kind in _MOMENTS:
            saving.optimizer.write(f"{name}.{key}", state.vectors[kind][name].numpy())
        saving.optimizer.write(f"{name}.{STEP}", state.steps.numpy())
