"""Text of the benchmark: the sources of installed Python packages, which every environment has."""

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

DOCUMENT_CHARACTERS = 6000


def python_sources(size: int) -> list[str]:
    """Return documents of about 6,000 characters, with about `size` bytes in total."""
    found: list[str] = []
    taken = 0
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = file.read_bytes().decode(errors="ignore")
        for at in range(0, len(text), DOCUMENT_CHARACTERS):
            document = text[at : at + DOCUMENT_CHARACTERS]
            found.append(document)
            taken += len(document.encode())
            if taken >= size:
                return found
    return found


def write_json_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
