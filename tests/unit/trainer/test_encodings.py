"""Text files are UTF-8, whatever the locale: object storage, other machines and other programs read them."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pseudoreal_trainer

PACKAGE = Path(pseudoreal_trainer.__file__).parent
WRITES = r"""
from pathlib import Path
from pseudoreal_trainer.storage.durable import write_atomically
from pseudoreal_trainer.storage.files import FileStorage
text = "\u4e16\r\n\u00e9\n"
write_atomically(Path("replaced"), text)
FileStorage(Path("created")).create(text)
FileStorage(Path("folder") / "completed").complete(text)
"""


def test_durable_texts_are_written_as_utf_8_under_a_locale_of_ascii(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    # Without the last two, Python takes UTF-8 in the place of ASCII.
    ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", WRITES], env=os.environ | ascii_alone, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("replaced", "created", "folder/completed"):
        assert (tmp_path / name).read_bytes() == "世\r\né\n".encode(), name


def test_every_text_file_is_opened_with_its_encoding() -> None:
    found = [f"{file.relative_to(PACKAGE)}:{line}" for file in PACKAGE.rglob("*.py") for line in without_encoding(file)]
    assert found == []


def without_encoding(file: Path) -> Iterator[int]:
    """Yield the line numbers of calls that open a text file without an encoding."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and opens_text(node)
            and not any(each.arg == "encoding" for each in node.keywords)
        ):
            yield node.lineno


def opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    given = [*call.args, *(each.value for each in call.keywords)]
    modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    # `file.open()` may be a method of our own; a path is nearly always an expression.
    opens_path = isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name) and not given
    return name == "open" and (opens_path or any(re.fullmatch(r"[rwax][+t]*", mode) for mode in modes))


def test_calls_that_name_no_encoding_are_found(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(
        "path.read_text()\n"
        "path.write_text(text, newline='')\n"
        "path.open('w')\n"
        "(folder / name).open()\n"
        "open(path, mode='rt')\n"
        "path.open('ab'); path.read_text(encoding='utf-8'); file.open(); os.open(path, flags); open(path, 'rb')\n"
    )
    assert [*without_encoding(file)] == [1, 2, 3, 4, 5]
