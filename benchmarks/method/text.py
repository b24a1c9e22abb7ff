"""The texts: documentation of the Linux kernel, and a dictionary that only chooses learning rates. Both are packages of
Debian; documents are drawn for validation by the hash of their names."""

import gzip
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from benchmarks.method.arms import REGISTERED

_CHUNK = 16_384
"""Characters of a document of the dictionary, before the next end of a paragraph."""


@dataclass(frozen=True)
class Text:
    name: str
    package: str
    one_in: int
    """One document in so many is kept for validation."""


MAIN = Text(REGISTERED.text, "linux-doc-6.1", one_in=24)
TUNING = Text(REGISTERED.tuning_text, "dict-gcide", one_in=60)


def prepare_texts(folder: Path, texts: Sequence[Text] = (MAIN, TUNING)) -> None:
    """Write tokens of the texts below `folder`, unless they are there: NAME/train, NAME/validation and
    NAME/tokenizer.json. The tokenizer is trained on MAIN, which comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        for text in texts:
            if not (folder / text.name / "done").exists():
                progress.note(f"preparing {text.name} from {text.package}")
                _prepare(text, folder, Path(work))


def _prepare(text: Text, folder: Path, work: Path) -> None:
    own, tokenizer = folder / text.name, folder / MAIN.name / "tokenizer.json"
    parts = {"train": work / f"{text.name}-train.jsonl", "validation": work / f"{text.name}-validation.jsonl"}
    with parts["train"].open("w") as train, parts["validation"].open("w") as validation:
        for name, content in _documents(text, _unpacked(text, work)):
            held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % text.one_in == 0
            (validation if held_out else train).write(json.dumps({"text": content}) + "\n")
    if text is MAIN:
        _data("train-tokenizer", parts["train"], "--output", own, "--vocabulary-size", REGISTERED.vocabulary)
    else:
        own.mkdir(parents=True, exist_ok=True)
        (own / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    for part, lines in parts.items():
        _data("prepare", lines, "--output", own / part, "--tokenizer", tokenizer)
    (own / "done").touch()


def _unpacked(text: Text, work: Path) -> Path:
    # apt drops its rights while it downloads, and must still be able to write there.
    work.chmod(0o755)
    subprocess.run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", text.package], cwd=work, check=True)
    target = work / text.package
    subprocess.run(["dpkg-deb", "-x", next(work.glob(f"{text.package}_*.deb")), target], check=True)
    return target


def _documents(text: Text, root: Path) -> Iterator[tuple[str, str]]:
    """Yield names and texts of documents, in the order of the hashes of their names: neighbours are strangers."""
    found = _pages(root / "usr/share/doc") if text is MAIN else _chunks(root / "usr/share/dictd/gcide.dict.dz")
    yield from sorted(found, key=lambda document: hashlib.sha256(document[0].encode()).digest())


def _pages(root: Path) -> Iterator[tuple[str, str]]:
    for path in root.rglob("html/_sources/**/*.rst.txt"):
        if "translations" not in path.parts:
            yield path.relative_to(root).as_posix(), path.read_text()


def _chunks(path: Path) -> Iterator[tuple[str, str]]:
    whole, begin = gzip.decompress(path.read_bytes()).decode("utf-8", "replace"), 0
    while begin < len(whole):
        end = whole.find("\n\n", begin + _CHUNK)
        end = len(whole) if end < 0 else end + 2
        yield str(begin), whole[begin:end]
        begin = end


def _data(command: str, *arguments: object) -> None:
    subprocess.run(["pseudoreal", "data", command, *map(str, arguments)], check=True, capture_output=True)
