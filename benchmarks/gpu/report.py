"""Write docs/benchmarks/gpu.md: `python -m benchmarks.gpu.report RESULTS`."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import pages
from benchmarks.gpu.cases import TIMED, Case, Point
from benchmarks.gpu.results import Measured, Record, Results, loss_differences

GPU = Path("docs/data/gpu-bench.json")
TITLE = "## Beside fully_shard"
_GIB = 2**30
_NONE = f"""{TITLE}

No figures yet: nothing was measured on a GPU. `make gpu-bundle` creates a folder with everything that a machine with a
GPU and no network needs; there, `bash .gpu-bundle/run.sh bench` writes `gpu-bench.json` within nine minutes. Here,
`make gpu-report RESULTS=gpu-bench.json` fills this section."""


def main(source: Path) -> None:
    Results.model_validate_json(source.read_bytes())
    GPU.parent.mkdir(exist_ok=True)
    if source.resolve() != GPU.resolve():
        shutil.copyfile(source, GPU)
    pages.put_section(pages.GPU, section())


def section(path: Path = GPU) -> str:
    """Return the section as Markdown; without results, a sentence that says so."""
    if not path.exists():
        return _NONE
    found = Results.model_validate_json(path.read_bytes())
    parts = [TITLE, _machine(found), _TEXT, *_tables(found), _left_out(found.records)]
    return "\n\n".join(part for part in parts if part)


_TEXT = f"""One rank, bfloat16 with float32 masters and AdamW, sequences of 2,048, blocks recomputed; weights, batches
and clipping are the same for both stacks. Medians of {TIMED} steps, in brackets the quartiles.

- *hidden*: of the time in which something is copied between host and device, the part in which kernels run, too.
- *device*: tensors, at most. *pinned*: host memory that is pinned, with what torch's allocator rounds up to.
- *forecast*: what `pseudoreal plan` predicts with speeds measured in the same run; in brackets how far it is off.
- fully_shard offloads by `CPUOffloadPolicy` with pinned memory. It brings all weights anew for each of the n
  micro-batches, so it is also timed with one."""


def _machine(found: Results) -> str:
    machine = found.machine
    tiny = " **Tiny models: this tried the program and measured nothing.**" if found.is_tiny else ""
    return (
        f"{machine.device}, driver {machine.driver}, torch {machine.versions['torch']}, {machine.cores} cores,"
        f" {machine.memory_gib:.0f} GiB of memory; home disk on {found.disk}. Commit {machine.commit[:12]},"
        f" {machine.date[:10]}, {found.seconds:.0f} s.{tiny}"
    )


def _tables(found: Results) -> Iterable[str]:
    models = dict.fromkeys(record.case.model for record in found.records if record.measured)
    for model in models:
        rows = [
            _row(record.case, measured)
            for record in found.records
            if record.case.model == model
            for measured in record.measured
        ]
        apart = loss_differences(found.records).get(model)
        losses = "" if apart is None else f"\n\nLosses of both stacks differ by {apart:.1e} at most, relative."
        yield f"### {model}\n\n{_HEAD}\n" + "\n".join(rows) + losses


_HEAD = """| stack, home, clipping | tokens | n | ms a step | tokens/s | hidden | device, GiB | pinned, GiB | forecast |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def _row(case: Case, one: Measured) -> str:
    first, third = one.quartiles
    hidden = "–" if one.hidden_share is None else f"{one.hidden_share:.0%}"
    forecast, device = "–", f"{one.device_peak_bytes / _GIB:.1f}"
    if one.forecast is not None:
        forecast = f"{1000 * one.forecast.seconds:,.0f} ({one.forecast.seconds / one.median - 1:+.0%})"
        if one.device_peak_bytes:
            device += f" ({one.forecast.device_bytes / one.device_peak_bytes - 1:+.0%})"
    milliseconds = f"{1000 * one.median:,.0f} ({1000 * first:,.0f}–{1000 * third:,.0f})"
    return (
        f"| {case.stack}, {case.home}, {case.clipping} | {one.point.tokens:,} | {one.point.micro_batches} |"
        f" {milliseconds} | {one.tokens_per_second:,.0f} | {hidden} |"
        f" {device} | {one.pinned_bytes / _GIB:.1f} | {forecast} |"
    )


def _left_out(records: Sequence[Record]) -> str:
    lines = [
        f"- {record.case.label}: {_tokens(record.left_out)}{record.problem or 'no time'}."
        for record in records
        if record.left_out or record.problem
    ]
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


def _tokens(points: Sequence[Point]) -> str:
    return f"{', '.join(f'{point.tokens:,}' for point in points)} tokens: " if points else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
