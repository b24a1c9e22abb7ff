"""Results of comparing two versions of the engine, and their section of the report. Pure except for reading."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel

from benchmarks.results import RESULTS

Version = Literal["base", "new"]
What = Literal["seconds", "waited"]
_BOTH: tuple[Version, Version] = ("base", "new")
VERSIONS = RESULTS / "versions.json"


class VersionCase(BaseModel, frozen=True):
    model: str
    home: Literal["Host", "Disk"]
    micro_batches: int
    mixed: bool
    """True for bfloat16 passes with global clipping, False for float32 without clipping."""

    @property
    def label(self) -> str:
        how = "bfloat16, clipped" if self.mixed else "float32"
        return f"{self.model}, {self.home}, n = {self.micro_batches}, {how}"


class VersionSteps(BaseModel):
    """One start of two ranks. Entry i is step i, measured on the first rank."""

    warm_up: int
    seconds: list[float] = []
    waited: list[float] = []
    """Seconds per step that the main thread waited for reductions and updates of its own rank."""
    losses: list[float] = []


class VersionPair(BaseModel):
    """Both versions in one case, over all rounds."""

    case: VersionCase
    base: list[VersionSteps]
    new: list[VersionSteps]

    @property
    def speedup(self) -> float:
        """The base's step time divided by the new version's; medians of all timed steps."""
        return _median(self.base, "seconds") / _median(self.new, "seconds")

    def milliseconds(self, version: Version, what: What) -> float:
        return 1000 * _median(self.base if version == "base" else self.new, what)


class Versions(BaseModel):
    base: str
    """Commit."""
    new: str
    pairs: list[VersionPair]


def _median(runs: Sequence[VersionSteps], what: What) -> float:
    return median(float(value) for run in runs for value in getattr(run, what)[run.warm_up :])


def read(path: Path = VERSIONS) -> Versions:
    return Versions.model_validate_json(path.read_bytes())


def section() -> str:
    """Return the section as Markdown, from the newest results."""
    found = read()
    rows = "\n".join(_row(pair) for pair in found.pairs)
    return f"""## The engine beside an earlier one

The engine of commit {found.new} is compared with the engine of {found.base}: two ranks, fully sharded state, the same
batches and first weights. The losses are equal to the bit; otherwise there would be no row. The two versions take
turns, in fresh processes. "Waited" is the time of a step for which the main thread of the first rank waited for
reductions and updates of its own rank.

| case | before, ms | after, ms | speed-up | waited before, ms | waited after, ms |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows}"""


def _row(pair: VersionPair) -> str:
    steps = [f"{pair.milliseconds(version, 'seconds'):,.0f}" for version in _BOTH]
    waits = [f"{pair.milliseconds(version, 'waited'):,.0f}" for version in _BOTH]
    return f"| {' | '.join([pair.case.label, *steps, f'{pair.speedup:.2f}×', *waits])} |"
