"""The input files, and their grouping: one process takes one group at a time. The order of groups determines the
numbers of shards."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pseudoreal_trainer.data.prepare.formats.fast_llm import fast_llm_records
from pseudoreal_trainer.data.prepare.formats.mds import MdsDataset, read_mds
from pseudoreal_trainer.data.prepare.formats.parquet import parquet_records
from pseudoreal_trainer.data.prepare.formats.records import START, Mark, Record
from pseudoreal_trainer.data.prepare.formats.text_files import json_records, text_records
from pseudoreal_trainer.data.prepare.reading.files import InputFile, LocalFile
from pseudoreal_trainer.data.prepare.reading.remote import is_remote, remote_files
from pseudoreal_trainer.errors import InvalidJobError

GROUP_BYTES = 16 << 20
"""Size in bytes at which a group of consecutive inputs ends; the group includes the input that reaches it. Ten thousand
small files therefore do not become as many shards. An MDS folder is a group of its own."""

_READERS: dict[str, Callable[[InputFile, str, Mark], Iterator[Record]]] = {
    ".txt": lambda file, *_: text_records(file),
    ".jsonl": json_records,
    ".json": json_records,
    ".parquet": parquet_records,
}
_FAST_LLM = ".fast_llm_dataset"
_COMPRESSED = (".gz", ".zst")
_WITH_COMPRESSION = (".txt", ".jsonl", ".json")
REMOTE_KINDS = "*.jsonl, *.json or *.txt (also .gz or .zst), *.parquet"
KINDS = f"{REMOTE_KINDS}, *.fast_llm_dataset, or a folder in the format MDS"


@dataclass(frozen=True)
class Input:
    name: str
    """Path below the given folder; for a file or MDS folder that was given itself, its name."""
    path: str
    """Path or URL, without secrets."""
    files: tuple[InputFile, ...]
    """The files that are read."""
    mds: MdsDataset | None = None

    @property
    def size(self) -> int:
        """Bytes of all files when they were found."""
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> str:
        return self.files[0].identity

    def records(self, field: str, end_of_document: int, begin: Mark = START) -> Iterator[Record]:
        """Yield the records from `begin` on, a mark of an earlier record."""
        if self.mds is not None:
            return self.mds.records(field, end_of_document)
        (file,) = self.files
        kind = _kind(file.name)
        if kind == _FAST_LLM:
            return fast_llm_records(Path(file.name))
        assert kind is not None, "`_inputs_of` rejects files of unknown kind"
        return _READERS[kind](file, field, begin)

    def check_unchanged(self) -> None:
        """Raise TrainingError if a file is not the one that was found: another process is writing it."""
        for file in self.files:
            file.check_unchanged()

    def digest(self) -> str:
        """Return the SHA-256 of the content; for remote files, of sizes and versions."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Group:
    number: int
    inputs: tuple[Input, ...]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.inputs)


def find_inputs(places: Sequence[str | Path]) -> list[Input]:
    """Return the inputs in the order of `places`, paths or URLs; inputs of a folder or pattern in the order of their
    names. Raises InvalidJobError if there are none, or an input is given twice."""
    found = [each for place in places for each in (_remote_inputs if is_remote(str(place)) else _inputs_of)(place)]
    seen: set[str] = set()
    for each in found:
        if each.identity in seen:
            raise InvalidJobError(f"{each.path} is given twice; its text would be trained on twice as often")
        seen.add(each.identity)
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


def _remote_inputs(place: str | Path) -> list[Input]:
    def is_read(name: PurePath) -> bool:
        return _kind(name) in _READERS

    files = remote_files(str(place), is_read, REMOTE_KINDS)
    return [Input(name, str(file), (file,)) for name, file in files]


def _inputs_of(place: str | Path) -> list[Input]:
    path = Path(place)
    if path.is_dir():
        if (mds := read_mds(path)) is not None:
            return [Input(path.name, str(path), tuple(LocalFile.found(file) for file in mds.files), mds)]
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
    return Input(name, str(path), (LocalFile.found(path),))


def _kind(path: PurePath) -> str | None:
    """Return the suffix that determines the reader; None: there is no reader for the file."""
    if path.suffix in _COMPRESSED:
        inner = PurePath(path.stem).suffix
        return inner if inner in _WITH_COMPRESSION else None
    return path.suffix if path.suffix in (*_READERS, _FAST_LLM) else None
