"""Best-fit packing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830): an order of
documents in which rows of `sequence` tokens cut as few documents as possible. Pure.

Windows are read consecutively, so a row is the start of a window, and the packing is only an order. A document of n
tokens at position p of a row is cut as rarely as possible if p + (n mod `sequence`) is at most `sequence`: the
document then touches ceil(n / sequence) rows. So documents may follow each other, in any order, if their remainders
modulo `sequence` together fit into one row; these documents form a block. Documents are assigned to blocks by their
remainders, largest first, each to the block where it leaves the least room (best fit decreasing). The rest is padded
with empty documents of one token each, the end-of-document token. With masked documents, padding contributes no loss:
the first token of a document is never a target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Block:
    """Consecutive rows: whole documents and padding, together a multiple of `sequence` tokens."""

    room: int
    """Number of padding tokens."""
    documents: list[int] = field(default_factory=list)

    def order(self) -> Iterator[int | None]:
        """Yield the documents in order, and None for each token of the padding."""
        yield from self.documents
        yield from [None] * self.room


class _Shelf:
    """Blocks by their room."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}
        self._rooms = 0
        """Bit n is set if a block has room n, so the smallest sufficient room is found without a search."""

    def put(self, block: Block) -> None:
        self._blocks.setdefault(block.room, []).append(block)
        self._rooms |= 1 << block.room

    def take(self, size: int) -> Block | None:
        """Remove and return the block with the smallest room of at least `size`; None if there is none."""
        enough = self._rooms >> size
        if not enough:
            return None
        room = size + (enough & -enough).bit_length() - 1
        block = self._blocks[room].pop()
        if not self._blocks[room]:
            self._rooms ^= 1 << room
        return block


def best_fit(lengths: Sequence[int], sequence: int) -> list[Block]:
    """Return blocks that contain each document once. `lengths`: tokens of each document, end token included."""
    sizes = [length % sequence for length in lengths]
    blocks = [Block(0, [document]) for document, size in enumerate(sizes) if not size]
    shelf = _Shelf()
    for document in sorted((each for each, size in enumerate(sizes) if size), key=lambda each: -sizes[each]):
        block = shelf.take(sizes[document])
        if block is None:
            block = Block(sequence)
            blocks.append(block)
        block.documents.append(document)
        block.room -= sizes[document]
        if block.room:
            shelf.put(block)
    return blocks
