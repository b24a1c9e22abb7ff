"""Export of a checkpoint's weights into a new folder."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.checkpoint.materialize import Tracked
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.convert.formats import FORMATS
from pseudoreal_trainer.convert.huggingface import Options
from pseudoreal_trainer.data.tokenizer.saved import saved_tokenizer
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

_T = TypeVar("_T")


def _untracked(items: Iterable[_T], _: str) -> Iterable[_T]:
    return items


def export_checkpoint(
    store: CheckpointStore,
    head: Head,
    name: str,
    output: Path,
    options: Options | None = None,
    tracked: Tracked[str] = _untracked,
) -> None:
    """Verify the checkpoint and write its weights in the format `name`, a key of FORMATS, into a new folder. Without a
    tokenizer in the options, the job's is written.

    Raises ValueError if the folder exists or the format cannot express the model, OSError, and TrainingError, for
    instance for a corrupt checkpoint. The error says so if the folder is left without all of its files.
    """
    options = options or Options()
    check_absent(output)
    store.verify(head)
    output.mkdir(parents=True)
    try:
        with saved_tokenizer(store.work_directory) as kept:
            FORMATS[name](store.reader(head), output, tracked, replace(options, tokenizer=options.tokenizer or kept))
    except (ValueError, OSError, TrainingError) as error:
        raise _with_remedy(output, error) from error


def check_absent(path: StoragePath) -> None:
    """Raise ValueError if the path exists."""
    if storage_of(path).exists():
        raise ValueError(f"{path} exists, and is not replaced; choose another name, or remove it first")


def _with_remedy(folder: Path, error: Exception) -> Exception:
    """Remove the folder of a failed export if it is empty, and return `error`. If the folder has files, return a
    TrainingError with the text of `error` and the remedy."""
    try:
        folder.rmdir()
    except OSError:
        return TrainingError(
            f"{error}; this error stopped the export, so the files in {folder} are incomplete: remove this folder, and"
            " export again"
        )
    return error
