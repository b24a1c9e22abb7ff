"""Best-fit packing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830): an order of
documents in which rows of `sequence` tokens cut as few documents as possible. Pure.

Windows are read one after the other, so a row is what a window begins with, and the packing is nothing but an order.
A document of n tokens that begins at the place p of a row is cut as seldom as can be when p + n mod `sequence` is at
most `sequence`: it then touches ceil(n / sequence) rows, one if it fits into one. So documents may follow each other,
in any order, while what they have beyond whole rows fits into one row together: that is a block. Documents are put
into blocks by what they have beyond whole rows, the largest first, each where it leaves the least room (best fit
decreasing). What remains is padded with documents that are empty, of one token each: the one that ends documents. With
masked documents no loss is counted for them, as none is for the first token of any document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Block:
    """Rows that follow each other: whole documents whose tokens, with the padding, are a multiple of `sequence`."""

    room: int
    """Tokens of the padding."""
    documents: list[int] = field(default_factory=list)

    def order(self) -> Iterator[int | None]:
        """The documents in their order, and None for each token of the padding."""
        yield from self.documents
        yield from [None] * self.room


class _Shelf:
    """Blocks by their room."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}
        self._rooms = 0
        """Bit n is set if a block has a room of n: the smallest one that suffices is found without a search."""

    def put(self, block: Block) -> None:
        self._blocks.setdefault(block.room, []).append(block)
        self._rooms |= 1 << block.room

    def take(self, size: int) -> Block | None:
        """Removes the block with the smallest room that is at least `size`, if there is one."""
        enough = self._rooms >> size
        if not enough:
            return None
        room = size + (enough & -enough).bit_length() - 1
        block = self._blocks[room].pop()
        if not self._blocks[room]:
            self._rooms ^= 1 << room
        return block


def best_fit(lengths: Sequence[int], sequence: int) -> list[Block]:
    """All documents, each once. `lengths`: tokens of each, its end included."""
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
