"""One text in every format that can be prepared. MDS and Fast-LLM files are written byte by byte from the descriptions
of their formats."""

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tokens = Sequence[int]


def json_lines(texts: Sequence[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": number, field: text}).encode() + b"\n" for number, text in enumerate(texts))


def write_jsonl(folder: Path, texts: Sequence[str]) -> Path:
    return _written(folder / "a.jsonl", json_lines(texts))


def write_gzip(folder: Path, texts: Sequence[str]) -> Path:
    """Write two members, like `cat a.gz b.gz`."""
    half = len(texts) // 2
    members = [gzip.compress(json_lines(texts[:half])), gzip.compress(json_lines(texts[half:]))]
    return _written(folder / "a.jsonl.gz", b"".join(members))


def write_zstandard(folder: Path, texts: Sequence[str]) -> Path:
    """Write two frames with a skippable frame in between, like pzstd."""
    import pyarrow

    half = len(texts) // 2
    parts = (json_lines(texts[:half]), json_lines(texts[half:]))
    first, last = (pyarrow.compress(part, "zstd", asbytes=True) for part in parts)
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"skip!"
    return _written(folder / "a.jsonl.zst", first + skipped + last)


def write_parquet(folder: Path, texts: Sequence[str]) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": [*range(len(texts))], "text": [*texts]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return folder / "a.parquet"


def write_text(folder: Path, texts: Sequence[str]) -> Path:
    for number, text in enumerate(texts):
        if number % 2:
            (folder / f"{number:03d}.txt").write_bytes(text.encode())
        else:
            (folder / f"{number:03d}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def write_mds_text(folder: Path, texts: Sequence[str]) -> Path:
    columns: dict[str, tuple[str, int | None]] = {"id": ("int64", 8), "text": ("str", None), "url": ("str", None)}
    rows = [{"id": struct.pack("<q", 1), "text": text.encode(), "url": b"u" * 3} for text in texts]
    return write_mds(folder, columns, [rows[:9], rows[9:]])


def write_mds(
    folder: Path, columns: dict[str, tuple[str, int | None]], shards: Sequence[Sequence[dict[str, bytes]]]
) -> Path:
    """Write an MDS folder. `columns`: name -> encoding and size in bytes; None: variable size."""
    names = sorted(columns)
    described = []
    for number, rows in enumerate(shards):
        samples = [_mds_sample(names, columns, row) for row in rows]
        config = json.dumps({"column_names": names}).encode()
        begin = 4 * (len(samples) + 2) + len(config)
        ends = begin + np.cumsum([0, *map(len, samples)])
        content = struct.pack("<I", len(samples)) + ends.astype("<u4").tobytes() + config + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(content)
        described.append(
            {
                "column_encodings": [columns[name][0] for name in names],
                "column_names": names,
                "column_sizes": [columns[name][1] for name in names],
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "samples": len(samples),
                "size_limit": 67108864,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": described, "version": 2}))
    return folder


def _mds_sample(names: list[str], columns: dict[str, Any], row: dict[str, bytes]) -> bytes:
    sizes = [len(row[name]) for name in names if columns[name][1] is None]
    return np.array(sizes, "<u4").tobytes() + b"".join(row[name] for name in names)


def write_foundry(folder: Path, documents: Sequence[Tokens], row: int) -> Path:
    """Write rows of tokens, int64 in a column of bytes, like llm-foundry: rows cut documents anywhere, and a last
    incomplete row is missing, so the test's last document ends with a row."""
    tokens = np.concatenate([np.array(document, "<i8") for document in documents])
    rows = [{"tokens": part.tobytes()} for part in np.split(tokens, range(row, len(tokens), row))]
    return write_mds(folder, {"tokens": ("bytes", None)}, [rows[:5], rows[5:6], rows[6:]])


def write_arrays(folder: Path, documents: Sequence[Tokens]) -> Path:
    """Write one document per row, as arrays of variable type and shape."""
    rows = [
        {"tokens": bytes([33, 1 << 2 | 1]) + struct.pack("<H", len(document)) + np.array(document, "<i4").tobytes()}
        for document in documents
    ]
    return write_mds(folder, {"tokens": ("ndarray", None)}, [rows])


def write_fast_llm(file: Path, documents: Sequence[Tokens]) -> Path:
    tokens = np.concatenate([np.array(document, "<i2") for document in documents]).tobytes()
    ends = np.cumsum([0, *map(len, documents)]).astype("<i8").tobytes()
    part = b"token begin" + tokens + ends + b"token end"
    begin = 33 + len(b"lm begin")
    described = {
        "type": "language_model",
        "begin": 33,
        "end": begin + len(part) + len(b"lm end"),
        "tokens": {
            "type": "token",
            "begin": begin,
            "end": begin + len(part),
            "num_documents": len(documents),
            "num_tokens": len(tokens) // 2,
            "data_type": "int16",
        },
        "loss_masking_spans": {"type": "none"},
    }
    body = b"lm begin" + part + b"lm end"
    config = json.dumps(described).encode()
    content = b"fast_llm_prepared_dataset" + struct.pack(">Q", 33 + len(body)) + body
    return _written(file, content + struct.pack(">I", len(config)) + config)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
