"""One group of inputs, from what an earlier run has left of it to its last shard.

What is done is in one file, replaced after each shard: a run that is killed loses the shard that it was making.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from pseudoreal_api.base import ApiModel
from pydantic import ValidationError

from pseudoreal_trainer.checkpoint.storage.durable import write_atomically
from pseudoreal_trainer.data.prepare import shards
from pseudoreal_trainer.data.prepare.encoding import Encoder, Faults
from pseudoreal_trainer.data.prepare.formats.records import Record
from pseudoreal_trainer.data.prepare.inputs import Group
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.prepare.shards import Target, gather
from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer
from pseudoreal_trainer.data.tokens.native import INDEX, Shard, finished_shard, token_type
from pseudoreal_trainer.errors import InvalidJobError

RECORDS = "prepared"
"""Folder, beside the shards, with a file for each group."""


class Done(ApiModel):
    """A shard that is there."""

    shard: Shard
    records: int
    """Records of the group up to its end."""
    malformed: int
    """Those of them that were left out."""
    padding: int


class GroupRecord(ApiModel):
    source: str
    """SHA-256 that stands for the inputs' content and for all that decides what becomes of it."""
    inputs: list[str]
    shards: list[Done]
    malformed: int = 0
    """Documents that were left out, known once it is finished."""
    is_finished: bool


class Progress(shards.Progress, Protocol):
    def skip(self) -> None:
        """The whole group is there already."""


@dataclass(frozen=True)
class Work:
    """All that one process needs to know of a group."""

    group: Group
    settings: Settings
    folder: Path


def prepare_group(work: Work, tokenizer: Tokenizer, progress: Progress) -> GroupRecord:
    """Makes the shards of the group that are not there yet. Raises InvalidJobError where an input cannot be used."""
    record = _begun(work, tokenizer)
    sound = _sound(work, tokenizer, record)
    if record.is_finished and sound == record.shards:
        progress.skip()
        return record
    record = record.model_copy(update={"shards": sound, "is_finished": False})
    _remove_leftovers(work, len(sound))
    faults = Faults(work.settings.most_malformed, sound[-1].malformed if sound else 0)
    for done in _made(work, tokenizer, progress, record, faults):
        record = record.model_copy(update={"shards": [*record.shards, done]})
        _write_record(work, record)
    record = record.model_copy(update={"malformed": faults.count, "is_finished": True})
    _write_record(work, record)
    return record


def _begun(work: Work, tokenizer: Tokenizer) -> GroupRecord:
    """What an earlier run has left; nothing where it was of other content, or is unreadable."""
    parts = [work.settings.identity(tokenizer), *(each.sha256() for each in work.group.inputs)]
    source = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    names = [each.name for each in work.group.inputs]
    nothing = GroupRecord(source=source, inputs=names, shards=[], is_finished=False)
    try:
        found = GroupRecord.model_validate_json(_record_path(work).read_bytes())
    except (FileNotFoundError, ValidationError):
        return nothing
    return found if found.source == source else nothing


def _sound(work: Work, tokenizer: Tokenizer, record: GroupRecord) -> list[Done]:
    """The shards from the first on whose files are there."""
    sound = []
    for done in record.shards:
        try:
            found = finished_shard(work.folder, int(done.shard.name), token_type(tokenizer.vocabulary))
        except InvalidJobError:  # a file was cut
            break
        if found != done.shard:
            break
        sound.append(done)
    return sound


def _remove_leftovers(work: Work, sound: int) -> None:
    """Removes the index, which would name what is replaced now, and the group's shards from the number `sound` on, in
    whatever state they are."""
    (work.folder / INDEX).unlink(missing_ok=True)
    first = work.group.number * shards.MOST_PER_GROUP
    prefix = f"{first:05d}"[:-3]
    for path in work.folder.glob(f"{prefix}[0-9][0-9][0-9].*"):
        if int(path.name.partition(".")[0]) >= first + sound:
            path.unlink()


def _made(work: Work, tokenizer: Tokenizer, progress: Progress, record: GroupRecord, faults: Faults) -> Iterator[Done]:
    """The shards after those of the record."""
    target = Target(
        work.folder, work.group.number, tokenizer.vocabulary, tokenizer.end_of_document, work.settings.sequence
    )
    records = record.shards[-1].records if record.shards else 0
    rest = islice(_records(work, tokenizer), records, None)
    batches = gather(rest, Encoder(tokenizer), faults, progress, work.settings.shard_tokens(tokenizer))
    for index, batch in enumerate(batches, start=len(record.shards)):
        records += batch.records
        if batch.documents:
            shard, padding = target.write(index, batch.documents)
            yield Done(shard=shard, records=records, malformed=faults.count, padding=padding)


def _records(work: Work, tokenizer: Tokenizer) -> Iterator[tuple[str, Record]]:
    """All records of the group, each with the name of its input; positions count from the begin of the group."""
    before = 0
    for each in work.group.inputs:
        for record in each.records(work.settings.text_field, tokenizer.end_of_document):
            yield each.name, Record(record.place, before + record.position, record.content)
        each.check_unchanged()
        before += each.size


def _write_record(work: Work, record: GroupRecord) -> None:
    path = _record_path(work)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, record.to_json(indent=1))


def _record_path(work: Work) -> Path:
    return work.folder / RECORDS / f"{work.group.number:05d}.json"
