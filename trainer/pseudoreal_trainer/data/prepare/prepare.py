"""The command `pseudoreal data prepare`: inputs become groups, groups become shards, the index is written last."""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.base import ApiModel
from pydantic import ValidationError

from pseudoreal_trainer.data.prepare.group import GroupRecord, Work
from pseudoreal_trainer.data.prepare.inputs import Group, find_inputs, groups_of
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.prepare.workers import TokenizerPath, Totals, prepare_groups
from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from pseudoreal_trainer.data.tokens.native import VERSION, Index, token_type, write_index
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.durable import write_atomically

PLAN = "prepare.json"


class Plan(ApiModel):
    """The inputs and options of a folder of shards. Written first and never changed: existing shards may have
    taken weeks to compute, and a mistyped option must not replace them."""

    tokenizer: str
    """SHA-256 of the tokenizer's file."""
    end_of_document: int
    settings: Settings
    groups: list[list[str]]
    """Names of the inputs of each group."""


@dataclass(frozen=True)
class Prepared:
    index: Index
    malformed: int
    padding: int
    """Number of padding tokens in all shards."""


def prepare(
    places: Sequence[str | Path],
    output: Path,
    tokenizer_path: str,
    end_of_document: int | None,
    settings: Settings,
    workers: int,
    tick: Callable[[Totals, int], None],
) -> Prepared:
    """Write the shards that are missing in the folder `output`. `tick` is called with the progress of all groups and
    the bytes of all inputs. Raises InvalidJobError if inputs or options cannot be used."""
    tokenizer = load_tokenizer(tokenizer_path, end_of_document)
    groups = groups_of(find_inputs(places))
    output.mkdir(parents=True, exist_ok=True)
    with _alone(output):
        _agree_on_plan(output, _plan(tokenizer, settings, groups))
        works = [Work(group, settings, output) for group in groups]
        size = sum(group.size for group in groups)
        path = TokenizerPath(tokenizer_path, tokenizer.end_of_document)
        records = prepare_groups(works, path, workers, lambda totals: tick(totals, size))
        index = _index(tokenizer, settings, records)
        write_index(output, index)
    return Prepared(
        index,
        sum(record.malformed for record in records),
        sum(done.padding for record in records for done in record.shards),
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock that keeps other processes of this machine from preparing the folder. The lock ends with the
    process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InvalidJobError(f"another process prepares {folder}; wait for its end") from error


def _plan(tokenizer: Tokenizer, settings: Settings, groups: Sequence[Group]) -> Plan:
    return Plan(
        tokenizer=tokenizer.sha256,
        end_of_document=tokenizer.end_of_document,
        settings=settings.model_copy(update={"most_malformed": 0}),
        groups=[[each.name for each in group.inputs] for group in groups],
    )


def _agree_on_plan(folder: Path, plan: Plan) -> None:
    """Write the plan of a new folder. Raises InvalidJobError if the folder was started with other inputs or options."""
    begun = read_plan(folder)
    if begun is None:
        if any(folder.iterdir()):
            raise InvalidJobError(f"{folder} holds other files, and no {PLAN}; choose a folder that is empty or new")
        write_atomically(folder / PLAN, plan.to_json(indent=1))
    elif begun != plan:
        raise InvalidJobError(
            f"{folder} was begun otherwise: {_difference(begun, plan)}. Choose another folder, or remove this one"
        )


def read_plan(folder: Path) -> Plan | None:
    """Return the plan of the folder; None if it has none. Raises InvalidJobError if the plan is damaged."""
    path = folder / PLAN
    try:
        return Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise InvalidJobError(f"{path} is damaged: {error.errors(include_url=False)[0]['msg']}") from error


def _difference(begun: Plan, plan: Plan) -> str:
    old, new = begun.to_dict(), plan.to_dict()
    old, new = old | old.pop("settings"), new | new.pop("settings")
    for key in [*new, *old]:
        if key != "groups" and old.get(key) != new.get(key):
            return f"{key} was {old.get(key)}, and is {new.get(key)} now"
    for number, (was, now) in enumerate(zip(begun.groups, plan.groups, strict=False)):
        if was != now:
            return f"its inputs {number} were {', '.join(was[:3])}, and are {', '.join(now[:3])} now"
    return f"it had {len(begun.groups)} groups of inputs, and has {len(plan.groups)} now"


def _index(tokenizer: Tokenizer, settings: Settings, records: Sequence[GroupRecord]) -> Index:
    shards = [done.shard for record in records for done in record.shards]
    if not shards:
        raise InvalidJobError("the inputs hold no text; give others, or the name of their field with --text-field")
    return Index(
        version=VERSION,
        dtype=token_type(tokenizer.vocabulary),
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        tokenizer=tokenizer.sha256,
        sequence=settings.sequence,
        text_bytes=sum(shard.text_bytes for shard in shards),
        shards=shards,
    )
