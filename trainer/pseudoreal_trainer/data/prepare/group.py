"""Preparation of one group of inputs, resumed from the shards of an earlier run.

The progress is recorded in one file, replaced after each shard: a killed run loses only the shard that it was writing.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from pseudoreal_api.base import ApiModel
from pydantic import ValidationError

from pseudoreal_trainer.data.prepare import shards
from pseudoreal_trainer.data.prepare.encoding import Encoder, Faults
from pseudoreal_trainer.data.prepare.formats.records import Mark, Record
from pseudoreal_trainer.data.prepare.inputs import Group
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.prepare.shards import Target, gather
from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer
from pseudoreal_trainer.data.tokens.native import INDEX, Shard, finished_shard, token_type
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.durable import write_atomically

RECORDS = "prepared"
"""Folder, beside the shards, with one file per group."""


class Next(ApiModel):
    """Place from which the records of a group are read after a shard; earlier records are not read again. The place is
    the end of the shard's last record, or earlier if an input can be read from its start alone."""

    input: int = 0
    """Index of the input in the group."""
    number: int = 0
    """Lines or rows of this input before the place."""
    byte: int = 0
    """Bytes of this input before the place; 0 for rows."""
    records: int = 0
    """Number of records of the group before the place."""


class Done(ApiModel):
    """Record of a finished shard."""

    shard: Shard
    records: int
    """Number of records of the group up to the end of the shard."""
    malformed: int
    """Number of these records that were left out."""
    padding: int
    next: Next = Next()
    """Where the records after the shard are."""


class GroupRecord(ApiModel):
    source: str
    """SHA-256 of the inputs' content and of everything else that determines the shards."""
    inputs: list[str]
    shards: list[Done]
    malformed: int = 0
    """Number of documents left out, known once the group is finished."""
    is_finished: bool


class Progress(shards.Progress, Protocol):
    def skip(self) -> None:
        """Record that the whole group exists already."""


@dataclass(frozen=True)
class Work:
    """Task of a worker process: a group of inputs, the options, and the output folder."""

    group: Group
    settings: Settings
    folder: Path


def prepare_group(work: Work, tokenizer: Tokenizer, progress: Progress) -> GroupRecord:
    """Write the missing shards of the group. Raises InvalidJobError if an input cannot be used."""
    record = _read_record(work, tokenizer)
    intact = _intact_shards(work, tokenizer, record)
    if record.is_finished and intact == record.shards:
        progress.skip()
        return record
    record = record.model_copy(update={"shards": intact, "is_finished": False})
    _remove_leftovers(work, len(intact))
    faults = Faults(work.settings.most_malformed, intact[-1].malformed if intact else 0)
    try:
        for done in _write_shards(work, tokenizer, progress, record, faults):
            record = record.model_copy(update={"shards": [*record.shards, done]})
            _write_record(work, record)
    except InvalidJobError:
        # A document that looks malformed may be half of an old file and half of a new one.
        for each in work.group.inputs:
            each.check_unchanged()
        raise
    record = record.model_copy(update={"malformed": faults.count, "is_finished": True})
    _write_record(work, record)
    return record


def _read_record(work: Work, tokenizer: Tokenizer) -> GroupRecord:
    """Return the record of an earlier run; an empty record if that run had other content, or the file is unreadable."""
    parts = [work.settings.identity(tokenizer), *(each.digest() for each in work.group.inputs)]
    source = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    names = [each.name for each in work.group.inputs]
    nothing = GroupRecord(source=source, inputs=names, shards=[], is_finished=False)
    try:
        found = GroupRecord.model_validate_json(_record_path(work).read_bytes())
    except (FileNotFoundError, ValidationError):
        return nothing
    return found if found.source == source else nothing


def _intact_shards(work: Work, tokenizer: Tokenizer, record: GroupRecord) -> list[Done]:
    """Return the leading shards with complete files: all exist and have the recorded sizes."""
    intact = []
    for done in record.shards:
        try:
            found = finished_shard(work.folder, int(done.shard.name), token_type(tokenizer.vocabulary))
        except InvalidJobError:  # a file was truncated
            break
        if found != done.shard:
            break
        intact.append(done)
    return intact


def _remove_leftovers(work: Work, intact: int) -> None:
    """Remove the index, because shards that it lists will be replaced, and the group's shards from number `intact` on,
    finished or not."""
    (work.folder / INDEX).unlink(missing_ok=True)
    first = work.group.number * shards.MOST_PER_GROUP
    prefix = f"{first:05d}"[:-3]
    for path in work.folder.glob(f"{prefix}[0-9][0-9][0-9].*"):
        if int(path.name.partition(".")[0]) >= first + intact:
            path.unlink()


def _write_shards(
    work: Work, tokenizer: Tokenizer, progress: Progress, record: GroupRecord, faults: Faults
) -> Iterator[Done]:
    """Write and yield the shards that the record does not list yet."""
    target = Target(
        work.folder, work.group.number, tokenizer.vocabulary, tokenizer.end_of_document, work.settings.sequence
    )
    records, begin = (record.shards[-1].records, record.shards[-1].next) if record.shards else (0, Next())
    reader = _Reader(work, tokenizer, begin)
    rest = islice(reader.records(), records - begin.records, None)
    batches = gather(rest, Encoder(tokenizer), faults, progress, work.settings.shard_tokens(tokenizer))
    for index, batch in enumerate(batches, start=len(record.shards)):
        records += batch.records
        if batch.documents:
            shard, padding = target.write(index, batch.documents)
            yield Done(shard=shard, records=records, malformed=faults.count, padding=padding, next=reader.next)


class _Reader:
    """Records of the group from a place on, and the place from which reading can go on after the last of them."""

    def __init__(self, work: Work, tokenizer: Tokenizer, begin: Next) -> None:
        self._work, self._end_of_document = work, tokenizer.end_of_document
        self.next = begin

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yield the records, each with the name of its input; positions count from the start of the group."""
        inputs, count = self._work.group.inputs, self.next.records
        before = sum(each.size for each in inputs[: self.next.input])
        for index in range(self.next.input, len(inputs)):
            each = inputs[index]
            begin = Mark(self.next.number, self.next.byte)
            for record in each.records(self._work.settings.text_field, self._end_of_document, begin):
                count += 1
                if (end := record.end) is not None:
                    self.next = Next(input=index, number=end.number, byte=end.byte, records=count)
                yield each.name, replace(record, position=before + record.position)
            each.check_unchanged()
            self.next = Next(input=index + 1, records=count)
            before += each.size


def _write_record(work: Work, record: GroupRecord) -> None:
    path = _record_path(work)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, record.to_json(indent=1))


def _record_path(work: Work) -> Path:
    return work.folder / RECORDS / f"{work.group.number:05d}.json"
