"""The section of docs/benchmarks/data.md, and its claim. Pure except for reading."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from textwrap import fill
from typing import get_args

from benchmarks import pages
from benchmarks.agreement import TOLERANCE
from benchmarks.claims import Claim
from benchmarks.data.results import (
    ALONE,
    DATATROVE,
    LONG,
    MEGATRON,
    ORDERED,
    OURS,
    PLAIN,
    WHOLE,
    Cell,
    Cells,
    Losses,
    Preparing,
    Reading,
    Resident,
    Results,
    Temperature,
    Training,
    read,
)
from benchmarks.machine import Stamp
from benchmarks.summary import MOST_SPREAD, Timing

TITLE = "## Text, token files and vocabularies"
_MIB = 2**20
_CACHE: dict[Temperature, str] = {"warm": "a cached file", "cold": "an uncached file"}
_TEXT = f"""The compared programs are called *stacks*. The stacks of a table take turns, and each turn runs in a fresh
process. A cell shows the median of several values, with the quartiles in square brackets. In the tables of the sections
on the preparation of text and on windows, each turn gives one value. In the tables of the sections on the loss and on
the Llama, each timed pass or step of a turn gives one value. If the distance between the quartiles is more than
{MOST_SPREAD:.0%} of the median, other programs disturbed the measurement. The cell of such a disturbed measurement
shows "not quiet" and the distance between the quartiles as a share of the median, and no comparison uses this cell. A
factor in round brackets is the speed of pseudoreal divided by the speed of the stack in this row. If the factor is
above 1, pseudoreal is faster."""

_AIMS = """This project has aims for the figures in the following table. The sections below the table explain these
figures."""


@dataclass(frozen=True)
class Bar:
    what: str
    limit: float
    show: Callable[[float], str]
    values: Sequence[float | None] | None
    """All values must reach the limit. A value is None if its cell was not quiet; the whole is None without a
    measurement."""
    is_least: bool = True
    """True if the limit is a minimum, False if it is a maximum."""
    sentence: str = ""
    """Sentence of the claim, with {} in place of the figure."""

    @property
    def statement(self) -> str:
        """The figure in words; `what` and the reason if there is no figure."""
        return self.sentence.format(self.figure) if self._known else f"{self.what}: {self.figure}"

    @property
    def bound(self) -> str:
        return f"{'at least' if self.is_least else 'less than'} {self.show(self.limit)}"

    @property
    def verdict(self) -> str:
        if self._known and not all(map(self._reaches, self._known)):
            return f"**not reached**: {self.figure}"
        return f"reached: {self.figure}" if self.is_reached else self.figure

    @property
    def is_reached(self) -> bool:
        """True if all values were measured on a quiet machine and reach the limit."""
        return bool(self.values) and None not in (self.values or ()) and all(map(self._reaches, self._known))

    @property
    def figure(self) -> str:
        """The value that is furthest from the limit, or why there is none."""
        if self.values is None:
            return "not measured"
        if len(self._known) < len(self.values) and all(map(self._reaches, self._known)):
            return "not measured on a quiet machine"
        return self.show(min(self._known) if self.is_least else max(self._known))

    @property
    def _known(self) -> list[float]:
        return [value for value in self.values or () if value is not None]

    def _reaches(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value < self.limit


def section(found: Results | None = None) -> str:
    """Return the section as Markdown, by default of the newest results."""
    results = found or read()
    assert results is not None, "results of at least one part exist"
    parts = [TITLE, _machine(results), _TEXT, _bars(results), *_parts(results), _noise(results)]
    return "\n\n".join(_filled(part) for part in parts)


def claim(results: Results) -> Claim:
    found, machine = bars(results), results.machine
    stamp = max(results.measured.values(), key=lambda one: one.date)
    return Claim(
        subject="Text and token files",
        page=pages.DATA.name,
        against="tokenizers, Megatron's IndexedDataset, datatrove, transformers",
        result=tuple(bar.statement for bar in found if bar.is_reached),
        loses=(),
        misses=tuple(f"{bar.statement}; the aim is {bar.bound}" for bar in found if not bar.is_reached),
        measured=f"{stamp.date}, at commit {stamp.commit}, on {machine.hardware}",
        release=stamp.release,
    )


def _parts(results: Results) -> Iterator[str]:
    measured = partial(_measured, results.measured)
    if results.preparing is not None:
        yield _preparing(results.preparing) + measured("preparing")
    if results.reading is not None:
        yield _reading(results.reading) + measured("reading")
    if results.resident is not None:
        yield _resident(results.resident) + measured("resident")
    if results.losses is not None:
        yield _losses(results.losses) + measured("losses")
    if results.training is not None:
        yield _training(results.training) + measured("training")


def _machine(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"The machine has {machine.hardware}. Versions: {versions}."


def _measured(stamps: dict[str, Stamp], part: str) -> str:
    stamp = stamps.get(part, Stamp(date="an unknown day", commit="an unknown commit"))
    return f"\n\nThese figures were measured on {stamp.date}, at commit {stamp.commit}."


def bars(results: Results) -> list[Bar]:
    """Return all bars with their measured values."""
    preparing, reading, training = results.preparing, results.reading, results.training
    resident = None if results.resident is None else [results.resident.grown_bytes / _MIB]
    return [
        Bar(
            "speed of preparing text, divided by the speed of the tokenizer library alone",
            0.85,
            "{:.1%}".format,
            _ratios(preparing, ALONE),
            sentence="pseudoreal prepares text at {} of the speed of the tokenizer library alone",
        ),
        *(
            Bar(
                f"speed of reading samples from {_CACHE[case]}, divided by the speed of *{stack}*",
                2.0,
                "{:.2f}×".format,
                _ratios(reading, stack, case),
                sentence=f"pseudoreal reads samples from {_CACHE[case]} {{}} as fast as *{stack}*",
            )
            for stack in (MEGATRON, LONG)
            for case in get_args(Temperature)
        ),
        Bar(
            "memory that a data set of 10^12 samples adds to a rank",
            100.0,
            "{:.1f} MiB".format,
            resident,
            is_least=False,
            sentence="a data set of 10^12 samples adds {} to the memory of a rank",
        ),
        Bar(
            "share of the time of steps in which pseudoreal waits for data",
            0.01,
            "{:.2%}".format,
            None if training is None else training.waited,
            is_least=False,
            sentence="pseudoreal waits for data during {} of the time of its steps",
        ),
    ]


def _ratios(part: Cells | None, stack: str, case: str | None = None) -> list[float | None] | None:
    """Return the stack's time divided by ours, in one case or in all cases."""
    return None if part is None else [part.ratio(stack, each) for each in part.cases if case in (None, each)]


def _bars(results: Results) -> str:
    table = _markdown(["figure", "aim", "result"], [[bar.what, bar.bound, bar.verdict] for bar in bars(results)])
    return f"{_AIMS}\n\n{table}"


def _preparing(found: Preparing) -> str:
    amount, [case] = found.text_bytes / 1e6, found.cases
    rows = [
        [stack, _rate(found.cell(stack, case), amount, "{:,.2f}".format) + _times(found, stack, case)]
        for stack in found.stacks
    ]
    return f"""### Preparation of text

The text is {amount:,.0f} MB of Python sources in {found.documents:,} documents, as JSON lines. The tokenizer is a
byte-level BPE of {found.vocabulary:,} tokens. The times in the table do not include the training of the tokenizer,
which took {found.train_seconds:.1f} s. Each stack runs on one processor with one thread. The row *{OURS}* shows the
command `pseudoreal data prepare`: the command reads, encodes, shuffles and writes the text, and computes digests. The
measured time of `pseudoreal data prepare` includes the start of the process that encodes the text. The row *{ALONE}*
shows the library that `pseudoreal data prepare` calls to encode text. For this row, the benchmark calls the library for
texts that are already in memory, and discards the tokens.

{_markdown(["", "MB of text a second"], rows)}"""


def _reading(found: Reading) -> str:
    rows = [
        [
            stack,
            *(
                _rate(found.cell(stack, case), found.windows[case], "{:,.0f}".format) + _times(found, stack, case)
                for case in found.windows
            ),
        ]
        for stack in found.stacks
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    counts = " and ".join(f"{count:,} windows in a {case} turn" for case, count in found.windows.items())
    return f"""### Windows at random

A *window* is a sample of {found.window:,} consecutive tokens. Each stack reads windows at random places of a file of
{found.file_bytes / 2**30:.2g} GiB, which has two bytes for each token. Each stack returns batches of 64 windows,
converted to 32-bit numbers. Each stack reads {counts}. The benchmark fails unless all stacks return the same tokens. In
a warm turn, the file is in the page cache. Before a cold turn, the benchmark drops the file from the page cache
(`posix_fadvise`, DONTNEED). If the machine is virtual, the physical machine that runs it may still have the file in a
cache. The versions of the compared packages are {versions}.

- *{OURS}* reads each window as one range of bytes of the file, no matter where documents begin and end.
- *{ORDERED}* also computes the random order of the windows during the turn. The stacks of all other rows get a list of
  the windows before the turn.
- *{MEGATRON}* is Megatron's IndexedDataset, which maps the file into memory. In this row, documents have 1,000 tokens
  on average, so a window consists of parts of several documents.
- *{LONG}* is IndexedDataset with the same tokens, but with documents of 2^20 tokens. So almost every window lies in one
  document, which is the best case for Megatron.
- *{DATATROVE}* is datatrove's DatatroveFileDataset.

{_markdown(["windows a second", *found.windows], rows)}"""


def _resident(found: Resident) -> str:
    return f"""### Memory of a rank

A process imports everything that a rank imports. Then the process opens a data set that mixes two sources (sets of
token files), with {found.samples:.2e} samples of {found.sequence} tokens. The data set has
{found.token_bytes / 1e12:.3g} TB in {found.files:,} shards, which are token files in this project's format. The shards
are sparse files, so they take almost no room on the disk. A step has {found.batch:,} samples. The process reads the
samples of the first {found.steps:,} steps of the first epoch, and then the samples of another {found.steps:,} steps, of
which the first is the last step of the first epoch. The resident memory of the process is
{found.before_bytes / _MIB:,.0f} MiB after the imports, and grows by {found.grown_bytes / _MIB:.1f} MiB to a peak of
{found.total_bytes / _MIB:,.0f} MiB."""


def _losses(found: Losses) -> str:
    rows = [
        [
            f"{case} tokens, {stack}",
            _milliseconds(found.cell(stack, case)) + _times(found, stack, case),
            _peak(found.cell(stack, case)),
        ]
        for case in found.cases
        for stack in found.stacks
    ]
    return f"""### Loss of large vocabularies

The table shows the time and the memory that the final norm, the head and the loss take, including all of their
gradients, for {found.tokens:,} tokens of hidden size {found.hidden} in float32. *{OURS}* computes logits and loss for
one part of the tokens after the other, as in training. *{WHOLE}* calls `F.linear` and `F.cross_entropy` on all tokens
at once. The benchmark fails if the losses of the two stacks, or the norms of their gradients, differ by more than
{TOLERANCE:g} (relative). The memory is the peak during the computation, without the memory of the weights and of the
input.

{_markdown(["vocabulary", "ms", "MiB"], rows)}"""


def _training(found: Training) -> str:
    [case] = found.cases
    tokens = found.sequences * found.sequence_length
    rows = [
        [
            stack,
            _milliseconds(found.cell(stack, case)) + _times(found, stack, case),
            _rate(found.cell(stack, case), tokens, "{:,.0f}".format),
        ]
        for stack in found.stacks
    ]
    return f"""### A Llama beside `transformers`

The model is {found.model}. The model has {found.parameters / 1e6:.1f} M parameters. A step has {found.sequences}
sequences of {found.sequence_length:,} tokens. Each stack trains in float32 with AdamW and clipping, on {found.threads}
threads of one process. *{OURS}* is this project's trainer. The trainer reads token files that `pseudoreal data prepare`
wrote, and writes its metrics as in a job. *{PLAIN}* is a plain training loop with the model of `transformers`. The loop
starts with the same weights as pseudoreal, and has all samples in memory. In {found.steps} steps the loss falls from
{found.first_loss:.4f} to {found.last_loss:.4f}. In each step, the losses of the two stacks differ by at most
{found.apart:.1e} (relative); the benchmark fails if these losses differ by more than {TOLERANCE:g}. In the median turn,
pseudoreal waited for data during {median(found.waited):.3%} of the time of its steps; in the worst turn, during
{max(found.waited):.3%}. Both the time of waiting and the time of the steps include the first step of the turn.

{_markdown(["", "ms a step", "tokens a second"], rows)}"""


def _rate(cell: Cell, amount: float, show: Callable[[float], str]) -> str:
    """Return the amount per second with quartiles, as text."""
    timing = cell.timing
    values = [show(1000 * amount / each) for each in (timing.milliseconds, timing.upper, timing.lower)]
    return _shown(timing, *values)


def _milliseconds(cell: Cell) -> str:
    timing = cell.timing
    return _shown(timing, *(f"{each:,.0f}" for each in (timing.milliseconds, timing.lower, timing.upper)))


def _shown(timing: Timing, middle: str, lower: str, upper: str) -> str:
    return f"{middle} [{lower}–{upper}]" if timing.is_quiet else f"not quiet ({timing.spread:.0%})"


def _times(part: Cells, stack: str, case: str) -> str:
    ratio = None if stack == OURS else part.ratio(stack, case)
    return "" if ratio is None else f" ({ratio:.2f}×)"


def _peak(cell: Cell) -> str:
    return "–" if cell.peak_bytes is None else f"{cell.peak_bytes / _MIB:,.0f}"


def _noise(results: Results) -> str:
    spreads = sorted(cell.timing.spread for part in results.timed for cell in part.cells)
    if not spreads:
        return ""
    left_out = sum(not cell.timing.is_quiet for part in results.timed for cell in part.cells)
    return (
        f"Noise: in half of the cells, the distance between the quartiles is at most {median(spreads):.0%} of the"
        f" median. In the worst cell, the distance is {spreads[-1]:.0%} of the median. {left_out} of"
        f" {len(spreads)} cells are not quiet, and no comparison uses these cells."
    )


def _filled(text: str) -> str:
    """Return the text with paragraphs filled to 120 characters; headings, lists and tables stay unchanged."""
    return "\n\n".join(
        part if part.startswith(("#", "-", "|")) else fill(part, 120, break_on_hyphens=False, break_long_words=False)
        for part in text.split("\n\n")
    )


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
