"""Requirements of torch.compile on a GPU, besides torch: Triton compiles a C program against Python's headers."""

import os
import shutil
import sysconfig
from pathlib import Path

from pseudoreal_trainer.errors import InvalidJobError

_REMEDY = "take an image that has it, as this project's Dockerfile makes it, or set compile.mode None in the phase"


def require_compiler() -> None:
    """Raise InvalidJobError if this machine cannot compile. Otherwise the error would first appear in the first
    step."""
    chosen = os.environ.get("CC")
    if chosen is not None and shutil.which(chosen) is None:
        raise InvalidJobError(
            f"compile.mode Blocks needs a C compiler, but CC names {chosen}, which is not there; {_REMEDY}"
        )
    if chosen is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        raise InvalidJobError(f"compile.mode Blocks needs a C compiler, but there is neither gcc nor clang; {_REMEDY}")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise InvalidJobError(f"compile.mode Blocks needs Python's headers, but {header} is not there; {_REMEDY}")
