"""`pseudoreal data prepare` beside the tokenizers' library alone, turn by turn in one run, each on one processor.

Alone, the library encodes texts that are in memory, one after the other, and nothing is kept: what no preparation can
exceed. Ours reads JSON lines, encodes, shuffles, writes and digests; its seconds are from the call to the index, with
the start of its process.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median

from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.data.prepare.prepare import prepare
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer
from pydantic import BaseModel

TEXT_BYTES = 24 << 20
VOCABULARY = 32_768
ROUNDS = 3
_DOCUMENT_CHARACTERS = 6000
_ALONE = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], "rb")]
begin = time.perf_counter()
for text in texts:
    tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
print(time.perf_counter() - begin)
"""


class Preparing(BaseModel, frozen=True):
    text_bytes: int
    documents: int
    vocabulary: int
    alone_seconds: list[float]
    prepare_seconds: list[float]
    train_seconds: float
    """Seconds of training the tokenizer on the same text."""

    @property
    def share(self) -> float:
        """Our rate as a part of the library's."""
        return median(self.alone_seconds) / median(self.prepare_seconds)


def measure(folder: Path) -> Preparing:
    """`folder`: an empty one, for text and tokens."""
    texts = _texts()
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))
    with progress.step("training a tokenizer"):
        begin = time.perf_counter()
        write_tokenizer(folder / "tokenizer", train_tokenizer(texts, VOCABULARY))
        trained = time.perf_counter() - begin
    alone, ours = [], []
    for turn in range(ROUNDS):
        with progress.step(f"preparing, {turn + 1} of {ROUNDS}"):
            alone.append(_alone(folder))
            ours.append(_prepared(folder))
    return Preparing(
        text_bytes=sum(len(text.encode()) for text in texts),
        documents=len(texts),
        vocabulary=VOCABULARY,
        alone_seconds=alone,
        prepare_seconds=ours,
        train_seconds=trained,
    )


def _texts() -> list[str]:
    """Python's and its packages' own sources in documents of some 6,000 characters."""
    found: list[str] = []
    size = 0
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        text = file.read_bytes().decode(errors="ignore")
        found += [text[at : at + _DOCUMENT_CHARACTERS] for at in range(0, len(text), _DOCUMENT_CHARACTERS)]
        size += len(text)
        if size >= TEXT_BYTES:
            break
    return found


def _alone(folder: Path) -> float:
    command = [sys.executable, "-c", _ALONE, str(folder / "tokenizer/tokenizer.json"), str(folder / "corpus.jsonl")]
    environment = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def _prepared(folder: Path) -> float:
    output = folder / "tokens"
    shutil.rmtree(output, ignore_errors=True)
    begin = time.perf_counter()
    prepare([folder / "corpus.jsonl"], output, str(folder / "tokenizer"), None, Settings(), 1, lambda *_: None)
    return time.perf_counter() - begin
