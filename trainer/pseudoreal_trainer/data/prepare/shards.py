"""One shard: its documents are collected in memory, ordered, and written."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from pseudoreal_trainer.data.permutation import permute
from pseudoreal_trainer.data.prepare.encoding import Document, Encoder, Faults
from pseudoreal_trainer.data.prepare.formats.records import Malformed, Record
from pseudoreal_trainer.data.prepare.packing import best_fit
from pseudoreal_trainer.data.tokens.native import Shard, ShardWriter
from pseudoreal_trainer.errors import InvalidJobError

MOST_PER_GROUP = 1000
"""Number of shard numbers reserved for a group."""


class Progress(Protocol):
    def wrote(self, document: Document) -> None:
        """Record that one more document was encoded."""

    def read(self, position: int, malformed: int) -> None:
        """Record that the group was read up to `position`, and the number of malformed documents so far."""


@dataclass
class Batch:
    """Documents collected for a shard."""

    documents: list[Document] = field(default_factory=list)
    records: int = 0
    """Number of records read for the batch, including empty and malformed ones."""
    tokens: int = 0


def gather(
    records: Iterable[tuple[str, Record]], encoder: Encoder, faults: Faults, progress: Progress, most: int
) -> Iterator[Batch]:
    """Yield batches of at least `most` tokens, except the last. `records`: each with the name of its input."""
    batch = Batch()
    for name, record in records:
        batch.records += 1
        try:
            document = encoder.document(record.content())
        except Malformed as error:
            faults.add(f"{name} {record.place}", error)
            document = None
        if document is not None and len(document.tokens):
            batch.documents.append(document)
            batch.tokens += len(document.tokens) + 1
            progress.wrote(document)
        progress.read(record.position, faults.count)
        if batch.tokens >= most:
            yield batch
            batch = Batch()
    if batch.records:
        yield batch


@dataclass(frozen=True)
class Target:
    """Destination and document order of the shards of one group. The order depends only on the numbers of the group and
    of the shard, so the same text in another format makes the same shards."""

    folder: Path
    group: int
    vocabulary: int
    end_of_document: int
    sequence: int | None
    """Tokens of a row into which documents are packed; None: no packing."""

    def number(self, index: int) -> int:
        if index >= MOST_PER_GROUP:
            raise InvalidJobError(
                f"group {self.group} of the inputs makes more than {MOST_PER_GROUP} shards; raise --shard-bytes, or"
                " give smaller files"
            )
        return self.group * MOST_PER_GROUP + index

    def write(self, index: int, documents: list[Document]) -> tuple[Shard, int]:
        """Write a shard. Return its entry in the index, and its number of padding tokens."""
        padding = 0
        number = self.number(index)
        with ShardWriter(
            self.folder, number, vocabulary=self.vocabulary, end_of_document=self.end_of_document
        ) as writer:
            for place in self._order(documents, index):
                if place is None:
                    padding += 1
                    writer.append([], 0)
                else:
                    writer.append(documents[place].tokens, documents[place].text_bytes)
            return writer.finish(), padding

    def _order(self, documents: list[Document], index: int) -> Iterator[int | None]:
        """Yield the indices of documents in the order of writing; None: an empty document as padding."""
        if self.sequence is None:
            yield from self._shuffled(len(documents), index)
            return
        blocks = best_fit([len(document.tokens) + 1 for document in documents], self.sequence)
        for number in self._shuffled(len(blocks), index):
            yield from blocks[number].order()

    def _shuffled(self, count: int, index: int) -> list[int]:
        order: list[int] = permute(np.arange(count, dtype=np.uint64), count, self.group, index).tolist()
        return order
