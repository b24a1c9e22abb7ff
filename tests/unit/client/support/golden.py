"""Expected output of commands, in reviewed files; RENEW_GOLDEN=1 rewrites the files."""

import os

from pseudoreal_dev.machine import paths

_FOLDER = paths.REPOSITORY / "tests" / "data" / "golden" / "terminal"


def golden(name: str, lines: list[str]) -> str:
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text("\n".join(lines) + "\n")
    return path.read_text()
