"""`pseudoreal data prepare` beside the tokenizers library alone, in alternating turns, each on one processor.

The library alone encodes texts from memory one after the other and keeps nothing: an upper bound for every preparation.
Ours reads JSON lines, encodes, shuffles, writes and digests; its seconds are from the call to the finished index,
including the start of the encoding process.
"""

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer

from benchmarks.data.child import environment
from benchmarks.data.results import ALONE, OURS, Cell, Preparing
from benchmarks.data.text import python_sources, write_json_lines

CASE = "MB/s per processor"
_ALONE = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
tokenizer.encode_special_tokens = True
texts = [json.loads(line)["text"] for line in open(sys.argv[2], "rb")]
begin = time.perf_counter()
for text in texts:
    tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
print(time.perf_counter() - begin)
"""
_OURS = """
import sys, time
from pathlib import Path
from pseudoreal_trainer.data.prepare.prepare import prepare
from pseudoreal_trainer.data.prepare.settings import Settings
tokenizer, corpus, output = sys.argv[1:]
begin = time.perf_counter()
prepare([Path(corpus)], Path(output), tokenizer, None, Settings(), 1, lambda *_: None)
print(time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Size:
    text_bytes: int
    vocabulary: int
    rounds: int


FULL = Size(24 << 20, 32_768, 5)
TINY = Size(1 << 16, 400, 2)


def measure(folder: Path, tiny: bool) -> Preparing:
    """Measure in `folder`, an empty folder for text and tokens."""
    size = TINY if tiny else FULL
    texts = python_sources(size.text_bytes)
    write_json_lines(folder / "corpus.jsonl", texts)
    with progress.step("training a tokenizer"):
        begin = time.perf_counter()
        write_tokenizer(folder / "tokenizer", train_tokenizer(texts, size.vocabulary))
        trained = time.perf_counter() - begin
    alone, ours = [], []
    for turn in range(size.rounds):
        with progress.step(f"preparing, {turn + 1} of {size.rounds}"):
            alone.append(_seconds(_ALONE, folder))
            ours.append(_seconds(_OURS, folder, str(folder / "tokens")))
            shutil.rmtree(folder / "tokens")
    return Preparing(
        cells=[Cell(stack=ALONE, case=CASE, seconds=alone), Cell(stack=OURS, case=CASE, seconds=ours)],
        text_bytes=sum(len(text.encode()) for text in texts),
        documents=len(texts),
        vocabulary=size.vocabulary,
        train_seconds=trained,
    )


def _seconds(program: str, folder: Path, *output: str) -> float:
    """Return the seconds that the program prints. The program is not a module, because the encoding process would
    import the module once more."""
    command = [sys.executable, "-c", program, str(folder / "tokenizer"), str(folder / "corpus.jsonl"), *output]
    return float(subprocess.run(command, env=environment(1), check=True, capture_output=True, text=True).stdout)
