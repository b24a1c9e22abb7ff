"""The input files, and their grouping: one process takes one group at a time. The order of groups determines the
numbers of shards."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_trainer.data.prepare.formats.fast_llm import fast_llm_records
from pseudoreal_trainer.data.prepare.formats.mds import MdsDataset, read_mds
from pseudoreal_trainer.data.prepare.formats.parquet import parquet_records
from pseudoreal_trainer.data.prepare.formats.records import Record
from pseudoreal_trainer.data.prepare.formats.text_files import json_records, text_records
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

GROUP_BYTES = 16 << 20
"""Size in bytes at which a group of consecutive inputs ends; the group includes the input that reaches it. Ten thousand
small files therefore do not become as many shards. An MDS folder is a group of its own."""

_READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {
    ".txt": lambda file, _: text_records(file),
    ".jsonl": json_records,
    ".json": json_records,
    ".parquet": parquet_records,
    ".fast_llm_dataset": lambda file, _: fast_llm_records(file),
}
_COMPRESSED = (".gz", ".zst")
_WITH_COMPRESSION = (".txt", ".jsonl", ".json")
KINDS = "*.jsonl, *.json or *.txt (also .gz or .zst), *.parquet, *.fast_llm_dataset, or a folder in the format MDS"


@dataclass(frozen=True)
class Input:
    name: str
    """Path below the given folder; for a file or MDS folder that was given itself, its name."""
    path: Path
    files: tuple[Path, ...]
    """The files that are read."""
    size: int
    """Bytes of all files when they were found."""
    mds: MdsDataset | None = None

    def records(self, field: str, end_of_document: int) -> Iterator[Record]:
        if self.mds is not None:
            return self.mds.records(field, end_of_document)
        kind = _kind(self.path)
        assert kind is not None, "`_inputs_of` rejects files of unknown kind"
        return _READERS[kind](self.path, field)

    def check_unchanged(self) -> None:
        """Raise TrainingError if the files have changed in size: another process is writing them."""
        if (size := _size(self.files)) != self.size:
            raise TrainingError(f"{self.path} had {self.size:,} bytes and has {size:,} now: it is being written")

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Group:
    number: int
    inputs: tuple[Input, ...]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.inputs)


def find_inputs(paths: Sequence[Path]) -> list[Input]:
    """Return the inputs in the order of `paths`; inputs of a folder in the order of their names. Raises InvalidJobError
    if there are none, or an input is given twice."""
    found = [each for path in paths for each in _inputs_of(path)]
    seen: set[Path] = set()
    for each in found:
        if (path := each.path.resolve()) in seen:
            raise InvalidJobError(f"{each.path} is given twice; its text would be trained on twice as often")
        seen.add(path)
    return found


def groups_of(inputs: Sequence[Input]) -> list[Group]:
    groups: list[list[Input]] = []
    size = GROUP_BYTES
    for each in inputs:
        if size >= GROUP_BYTES or each.mds is not None:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += GROUP_BYTES if each.mds is not None else each.size
    return [Group(number, tuple(members)) for number, members in enumerate(groups)]


def _inputs_of(path: Path) -> list[Input]:
    if path.is_dir():
        if (mds := read_mds(path)) is not None:
            return [Input(path.name, path, mds.files, _size(mds.files), mds)]
        # An uncompressed .json is mostly metadata; a .json file with text has to be named by the user.
        files = [file for file in path.rglob("*") if _kind(file) and file.suffix != ".json" and file.is_file()]
        if not files:
            raise InvalidJobError(f"{path} holds no file to prepare; these are: {KINDS}")
        return sorted((_file(file, file.relative_to(path).as_posix()) for file in files), key=lambda each: each.name)
    if not path.is_file():
        raise InvalidJobError(f"{path} is not there; give a file or a folder")
    if _kind(path) is None:
        raise InvalidJobError(f"{path} is of no kind that can be prepared; these are: {KINDS}")
    return [_file(path, path.name)]


def _file(path: Path, name: str) -> Input:
    return Input(name, path, (path,), _size((path,)))


def _size(files: tuple[Path, ...]) -> int:
    return sum(file.stat().st_size for file in files)


def _kind(path: Path) -> str | None:
    """Return the suffix that determines the reader; None: there is no reader for the file."""
    if path.suffix in _COMPRESSED:
        inner = Path(path.stem).suffix
        return inner if inner in _WITH_COMPRESSION else None
    return path.suffix if path.suffix in _READERS else None
