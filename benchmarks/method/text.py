"""The text: documentation of the Linux kernel, from a package of Debian. The hash of its name decides whether a
document chooses learning rates or is compared, and whether it is trained on or validates."""

import hashlib
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from benchmarks.method.arms import REGISTERED

PACKAGE = "linux-doc-6.1"
COMPARED, TUNING = REGISTERED.text, REGISTERED.tuning_text
_PARTS = {2: (COMPARED, "validation"), 0: (TUNING, "validation"), 1: (TUNING, "train"), 3: (TUNING, "train")}
"""Remainder of a document's hash by 20 -> its text and its part of it; all others are trained on and compared."""


def prepare_texts(folder: Path) -> None:
    """Write the tokens of both texts below `folder`, unless they are there: NAME/train, NAME/validation and
    NAME/tokenizer.json. The tokenizer is trained on the text that is compared."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    progress.note(f"preparing the text of {PACKAGE}")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        parts = _parts(_unpacked(Path(work)))
        for (text, part), documents in parts.items():
            lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
            (Path(work) / f"{text}-{part}.jsonl").write_text(lines)
        tokenizer = folder / COMPARED
        _data("train-tokenizer", Path(work) / f"{COMPARED}-train.jsonl", "--output", tokenizer,
              "--vocabulary-size", REGISTERED.vocabulary)  # fmt: skip
        for text, part in parts:
            lines_of_part = Path(work) / f"{text}-{part}.jsonl"
            _data("prepare", lines_of_part, "--output", folder / text / part, "--tokenizer", tokenizer)
        (folder / TUNING / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (folder / "done").touch()


def _unpacked(work: Path) -> Path:
    # apt drops its rights while it downloads, and must still be able to write there.
    work.chmod(0o755)
    subprocess.run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", PACKAGE], cwd=work, check=True)
    subprocess.run(["dpkg-deb", "-x", next(work.glob(f"{PACKAGE}_*.deb")), work / "root"], check=True)
    return work / "root/usr/share/doc"


def _parts(root: Path) -> dict[tuple[str, str], list[str]]:
    """Return text and part -> English documents, ordered by the hashes of their names: neighbours are strangers."""
    pages = [path for path in root.rglob("html/_sources/**/*.rst.txt") if "translations" not in path.parts]
    hashes = {int(hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest(), 16): path for path in pages}
    parts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for number, path in sorted(hashes.items()):
        parts[_PARTS.get(number % 20, (COMPARED, "train"))].append(path.read_text())
    return parts


def _data(command: str, *arguments: object) -> None:
    subprocess.run(["pseudoreal", "data", command, *map(str, arguments)], check=True, capture_output=True)
