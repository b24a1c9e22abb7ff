"""What the commands print, as files that were read and found good: RENEW_GOLDEN=1 writes them anew."""

import os

from pseudoreal_dev.machine import paths

_FOLDER = paths.REPOSITORY / "tests" / "data" / "golden" / "terminal"


def golden(name: str, lines: list[str]) -> str:
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text("\n".join(lines) + "\n")
    return path.read_text()
