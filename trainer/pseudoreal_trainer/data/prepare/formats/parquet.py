"""Parquet files."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pseudoreal_trainer.data.prepare.formats.records import Malformed, Record, Text
from pseudoreal_trainer.data.prepare.formats.text_files import pieces
from pseudoreal_trainer.errors import InvalidJobError, from_extra

if TYPE_CHECKING:
    from pyarrow import Schema

_ROWS = 256
"""Number of rows decoded at once."""


def parquet_records(file: Path, field: str) -> Iterator[Record]:
    """Yield one record per row, with its text in the column `field`. Raises InvalidJobError if the file is damaged or
    has no such text column."""
    with from_extra("data"):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            _check_column(file, opened.schema_arrow, field)
            rows, size, number = max(opened.metadata.num_rows, 1), file.stat().st_size, 0
            for batch in opened.iter_batches(_ROWS, columns=[field], use_threads=False):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield Record(f"row {number:,}", size * number // rows, partial(_text, text, field))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InvalidJobError(f"{file} cannot be read as Parquet ({error}); copy it again") from error


def _check_column(file: Path, schema: "Schema", field: str) -> None:
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
