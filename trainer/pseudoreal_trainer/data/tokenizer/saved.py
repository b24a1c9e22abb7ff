"""The tokenizer of a job, kept beside its checkpoints: `<work directory>/tokenizer/`. Without it, the model's tokens
have no meaning."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.data.tokenizer.tokenizer import TOKENIZER_FILE
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.path import StoragePath, storage_path
from pseudoreal_trainer.storage.storage import storage_of

TOKENIZER_CONFIG = "tokenizer_config.json"
BESIDE = (TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
"""Files beside tokenizer.json that define how texts start and end."""
_FOLDER = "tokenizer"
_FILES = (TOKENIZER_FILE, *BESIDE, "config.json")
"""Files that are kept with the checkpoints; config.json may name the end-of-document token."""


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer's file for its path or the path of its folder."""
    return path / TOKENIZER_FILE if path.is_dir() else path


def save_tokenizer(config: PhaseConfig) -> None:
    """Copy the job's tokenizer.json, if it has one, with the files that belong to it. Raises TrainingError."""
    if config.data.tokenizer.path is None:
        return
    file = tokenizer_file(Path(config.data.path) / config.data.tokenizer.path)
    folder = storage_path(config.storage) / _FOLDER
    try:
        storage_of(folder).make_folder()
        for name in _FILES:
            source = file if name == TOKENIZER_FILE else file.parent / name
            if source.exists():
                # Bytes, because read_text changes line ends: a tokenizer is identified by its SHA-256.
                storage_of(folder / name).replace(source.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"the tokenizer {file} cannot be kept in {folder}: {error}") from error


@contextmanager
def saved_tokenizer(work_directory: StoragePath) -> Iterator[Path | None]:
    """Yield the local path of the tokenizer.json kept in the work directory; None if the tokens are bytes, or no
    tokenizer was named. Raises OSError."""
    folder = work_directory / _FOLDER
    if not storage_of(folder / TOKENIZER_FILE).exists():
        yield None
    elif isinstance(folder, Path):
        yield folder / TOKENIZER_FILE
    else:
        with TemporaryDirectory() as local:
            for name in _FILES:
                if storage_of(folder / name).exists():
                    (Path(local) / name).write_bytes(storage_of(folder / name).read())
            yield Path(local) / TOKENIZER_FILE
