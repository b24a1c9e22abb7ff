"""Memory of a rank that reads a trillion samples: `python -m benchmarks.data.resident CORPUS RESULT` is the rank.

The files are native: an index, and shards of 2 GiB that are holes, so that 16 TB fit on any disk. Samples are short, so
that a trillion of them need no more than 16 TB.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.data.order import stretch
from pseudoreal_trainer.data.prefetch import Prefetch
from pseudoreal_trainer.data.sources import MixedStream
from pseudoreal_trainer.data.token_corpus import TokenCorpus, open_corpus
from pseudoreal_trainer.data.tokens.native import MOST_SHARD_BYTES, Index, Shard, write_index
from pydantic import BaseModel

from benchmarks.data import child
from benchmarks.data.memory import Growth
from benchmarks.data.results import Resident

WEIGHTS = {"web": 3, "code": 1}
_DIGEST = "0" * 64
_TOKEN_BYTES = 2


@dataclass(frozen=True)
class Size:
    shards: int
    shard_bytes: int
    steps: int


FULL = Size(7472, MOST_SHARD_BYTES, 200)
TINY = Size(8, 1 << 20, 5)
SEQUENCE, BATCH = 8, 1024


class Corpus(BaseModel, frozen=True):
    folder: str
    steps: int


class Grown(BaseModel, frozen=True):
    samples: int
    before_bytes: int
    grown_bytes: int


def measure(folder: Path, tiny: bool) -> Resident:
    size = TINY if tiny else FULL
    shards = shares(size.shards, WEIGHTS)
    with progress.step(f"making {size.shards:,} files without content"):
        for name, count in shards.items():
            make_source(folder / name, count, size.shard_bytes)
    with progress.step("memory of a rank"):
        grown = child.run("resident", Corpus(folder=str(folder.resolve()), steps=size.steps), Grown)
    return Resident(
        samples=grown.samples,
        sequence=SEQUENCE,
        token_bytes=size.shards * size.shard_bytes,
        files=size.shards,
        steps=size.steps,
        batch=BATCH,
        before_bytes=grown.before_bytes,
        grown_bytes=grown.grown_bytes,
    )


def shares(count: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Split the count by weights; the last entry takes the rest."""
    *names, last = weights
    found = {name: count * weights[name] // sum(weights.values()) for name in names}
    return found | {last: count - sum(found.values())}


def make_source(folder: Path, shards: int, shard_bytes: int) -> None:
    """Write native token files of zeros that occupy no disk space."""
    folder.mkdir()
    entries = []
    for number in range(shards):
        shard = Shard(
            name=f"{number:05d}",
            tokens=shard_bytes // _TOKEN_BYTES,
            documents=0,
            text_bytes=0,
            sha256=_DIGEST,
            lengths_sha256=_DIGEST,
        )
        with (folder / f"{shard.name}.bin").open("wb") as file:
            file.truncate(shard_bytes)
        entries.append(shard)
    index = Index(
        version=1, dtype="uint16", vocabulary=256, end_of_document=0, tokenizer=_DIGEST, text_bytes=0, shards=entries
    )
    write_index(folder, index)


def main(corpus: Corpus, result: Path) -> None:
    import pseudoreal_trainer.training.phase  # noqa: F401  # with all that a rank imports

    result.write_text(grown(corpus).model_dump_json())


def grown(asked: Corpus) -> Grown:
    """Read some steps from the start and some from the last step on, like a resumed job; return the growth
    of memory."""
    growth = Growth()
    corpus = _open(asked)
    samples = sum(source.samples for source in corpus.sources.values())
    for first in (0, samples - samples % BATCH):
        _read(corpus, first, asked.steps)
    return Grown(samples=samples, before_bytes=growth.before_bytes, grown_bytes=growth.peak_bytes)


def _open(asked: Corpus) -> TokenCorpus:
    model = {"layers": 1, "hiddenSize": 16, "attention": {"heads": 2}, "sequenceLength": SEQUENCE}
    sources = [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()]
    sets = [{"name": "validation", "path": "code"}]
    body = {
        "apiVersion": "pseudoreal.dev/v1alpha1",
        "kind": "PseudoRealJob",
        "metadata": {"name": "resident", "uid": "resident"},
        "spec": {
            "model": model | {"feedForward": {"size": 32}},
            "data": {"path": asked.folder, "sources": sources, "validation": {"sets": sets}},
            "phases": [{"name": "real", "until": {"step": 1}, "batch": {"sequences": BATCH}}],
        },
    }
    job = PseudoRealJob.from_object(body)
    corpus = open_corpus(phase_config(job, 0, execution=1, work_directory=asked.folder, offload_directory=asked.folder))
    assert isinstance(corpus, TokenCorpus)
    return corpus


def _read(corpus: TokenCorpus, first: int, steps: int) -> None:
    """Read `steps` steps from the cursor `first` on, like training: prefetched in a thread."""
    before = {"web": first * 3 // 4, "code": first - first * 3 // 4}
    stream = MixedStream(stretch(first, WEIGHTS, before), corpus.sources, SEQUENCE)
    with Prefetch(lambda cursor: stream.windows(cursor, cursor + BATCH), first, BATCH) as prefetch:
        for step in range(steps):
            prefetch.take(first + step * BATCH)


if __name__ == "__main__":
    main(Corpus.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
