"""Parquet files."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pseudoreal_trainer.data.prepare.formats.records import START, Malformed, Mark, Record, Text
from pseudoreal_trainer.data.prepare.formats.text_files import pieces
from pseudoreal_trainer.data.prepare.reading.files import InputFile
from pseudoreal_trainer.errors import InvalidJobError, from_extra

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import FileMetaData

_ROWS = 256
"""Number of rows decoded at once."""


def parquet_records(file: InputFile, field: str, begin: Mark = START) -> Iterator[Record]:
    """Yield one record per row from `begin` on, with its text in the column `field`; no other column is read. Raises
    InvalidJobError if the file is damaged or has no such text column."""
    with from_extra("data"):
        import pyarrow
        import pyarrow.parquet
    try:
        with file.open() as content, pyarrow.parquet.ParquetFile(content) as opened:
            _check_column(file, opened.schema_arrow, field)
            rows = max(opened.metadata.num_rows, 1)
            first, number = _row_group(opened.metadata, begin.number)
            row_groups = range(first, opened.metadata.num_row_groups)
            for batch in opened.iter_batches(_ROWS, row_groups, columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if number > begin.number:
                        done = file.size * number // rows
                        yield Record(f"row {number:,}", done, partial(_text, text, field), Mark(number))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidJobError(f"{file} cannot be read as Parquet ({error}); copy it again") from error


def _row_group(metadata: "FileMetaData", row: int) -> tuple[int, int]:
    """Return the row group that holds the row, or the number of row groups, and the number of rows before it."""
    before = 0
    for index in range(metadata.num_row_groups):
        rows = metadata.row_group(index).num_rows
        if before + rows > row:
            return index, before
        before += rows
    return metadata.num_row_groups, before


def _check_column(file: InputFile, schema: "Schema", field: str) -> None:
    from pyarrow import types

    if field not in schema.names:
        raise InvalidJobError(f"{file} has no column {field!r}; its columns are {', '.join(schema.names)}")
    kind = schema.field(field).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise InvalidJobError(f"the column {field!r} of {file} holds {kind}, not text; choose another one")


def _text(text: str | None, field: str) -> Text:
    if text is None:
        raise Malformed(f"it has nothing in {field!r}")
    return pieces(text)
