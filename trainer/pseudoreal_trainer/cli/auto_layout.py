"""Resolves `layout: Auto` before a pod's ranks start: the layout is chosen once and recorded beside the checkpoints;
later executions read the record.

Each pod of the first execution looks for the record, chooses a layout, and tries to write it. Storage lets exactly one
of these writes succeed, and all pods continue with the written layout. Other profiles or releases do not change a
recorded layout.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.layout import ChosenLayout
from pydantic import ValidationError

from pseudoreal_trainer.cgroups import threads_of
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.estimate.search.auto import choose, is_auto, laid_out, profile_of
from pseudoreal_trainer.storage.path import StoragePath, storage_path
from pseudoreal_trainer.storage.storage import storage_of

LAYOUTS = "layouts"

log = structlog.get_logger()


def resolve_layout(
    config: PhaseConfig, while_searching: Callable[[], AbstractContextManager[None]] = nullcontext
) -> tuple[PhaseConfig, ChosenLayout | None]:
    """Return the phase's config with the resolved layout, and the automatically chosen layout: chosen now, or recorded
    by an earlier execution. If the job specifies the layout, return the unchanged config and None.

    `while_searching`: context for the search. The context may end the search at any point, because the search is pure.
    Raises InvalidJobError if no layout fits or the profile is invalid, and TrainingError if storage fails.
    """
    if not is_auto(config):
        return config, None
    folder = storage_path(config.storage) / LAYOUTS
    path = folder / f"{config.phase}-{config.ranks}.json"
    try:
        layout = _read_record(path)
        if layout is None:
            storage_of(folder).make_folder()
            with while_searching():
                layout = _choose(config)
            layout = _write_record(path, layout)
    except OSError as error:
        raise TrainingError(f"the layout of phase {config.phase} cannot be kept in {path}: {error}") from error
    try:
        return laid_out(config, layout), layout
    except ValueError as error:
        raise TrainingError(f"{path} is not of this release: {error}; train with the release that wrote it") from error


def _choose(config: PhaseConfig) -> ChosenLayout:
    try:
        layout = choose(config, profile_of(config), threads_of(config.processes_per_worker))
    except ValueError as error:
        raise InvalidJobError(str(error)) from error
    log.info("layout_chosen", phase=config.phase, **layout.to_dict())
    return layout


def _read_record(path: StoragePath) -> ChosenLayout | None:
    try:
        return ChosenLayout.model_validate_json(storage_of(path).read())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise TrainingError(f"{path} makes no sense: {error}; restore it, or remove it to choose anew") from error


def _write_record(path: StoragePath, layout: ChosenLayout) -> ChosenLayout:
    """Write the record unless there is one. Return the recorded layout."""
    try:
        storage_of(path).create(layout.to_json(indent=1))
    except FileExistsError:
        if (first := _read_record(path)) is None:
            raise TrainingError(f"{path} was written by another pod and is not to be seen yet; try again") from None
        return first
    return layout
