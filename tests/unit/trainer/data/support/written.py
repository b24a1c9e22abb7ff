"""Native token files for tests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer
from pseudoreal_trainer.data.tokens.native import Index, ShardWriter, token_type, write_index

Tokens = list[int] | NDArray[Any]


def write_native(
    folder: Path, *shards: Iterable[Tokens], vocabulary: int = 256, end: int = 0, sequence: int | None = None
) -> Index:
    """Write token files of the tokenizer Bytes. `shards`: the documents of each shard, without end tokens; each token
    counts as one byte of text. `sequence`: tokens of a row, to mark documents as packed in the index."""
    written = []
    for number, documents in enumerate(shards):
        with ShardWriter(folder, number, vocabulary=vocabulary, end_of_document=end) as writer:
            for document in documents:
                writer.append(document, len(document))
            written.append(writer.finish())
    index = Index(
        version=1,
        dtype=token_type(vocabulary),
        vocabulary=vocabulary,
        end_of_document=end,
        tokenizer=ByteTokenizer().sha256,
        sequence=sequence,
        text_bytes=sum(shard.text_bytes for shard in written),
        shards=written,
    )
    write_index(folder, index)
    return index
