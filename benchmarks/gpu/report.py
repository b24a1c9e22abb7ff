"""Write docs/benchmarks/gpu.md: `python -m benchmarks.gpu.report RESULTS`."""

import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import claims, pages
from benchmarks.claims import Claim
from benchmarks.gpu.cases import TIMED, Case, Point
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.results import DOCTOR_FILE, RESULTS_FILE, Measured, Record, Results, loss_differences
from benchmarks.machine import release
from benchmarks.results import RESULTS

GPU, DOCTOR = RESULTS / RESULTS_FILE, RESULTS / DOCTOR_FILE
_MOST_BYTES = 64 << 20
"""Bytes of a file of results, unpacked."""
TITLE = "## Beside fully_shard"
_GIB = 2**30
_NONE = f"""{TITLE}

There are no figures yet: nothing was measured on a GPU. To measure:

1. Here, `make gpu-bundle` creates the folder `.gpu-bundle`, with everything that a machine with a GPU and no network
   needs. Copy the folder to such a machine.
2. On that machine, `bash .gpu-bundle/run.sh all` writes `pseudoreal-gpu.zip` within ten minutes. Copy the file back.
3. Here, `make gpu-report RESULTS=pseudoreal-gpu.zip` writes the measured figures into this page."""


def main(source: Path) -> None:
    """Keep the results in docs/data/, and write the page. `source`: the file of `collect`, or of one program."""
    for name, content in _files(source).items():
        if name == DOCTOR_FILE:
            Findings.validate_json(content)
        else:
            Results.model_validate_json(content)
        (RESULTS / name).write_bytes(content)
    pages.put_section(pages.GPU, section())
    if GPU.exists():
        claims.put(claim(Results.model_validate_json(GPU.read_bytes())))
    if DOCTOR.exists():
        pages.put_section(pages.GPU, examined(DOCTOR))


def _files(source: Path) -> dict[str, bytes]:
    """Return the name and the content of each file of results."""
    if not zipfile.is_zipfile(source):
        return {DOCTOR_FILE if source.name == DOCTOR_FILE else RESULTS_FILE: source.read_bytes()}
    with zipfile.ZipFile(source) as packed:
        known = [packed.getinfo(name) for name in (DOCTOR_FILE, RESULTS_FILE) if name in packed.namelist()]
        if large := [one.filename for one in known if one.file_size > _MOST_BYTES]:
            raise ValueError(
                f"{source} has {', '.join(large)} of more than {_MOST_BYTES >> 20} MiB; results are smaller"
            )
        return {one.filename: packed.read(one) for one in known}


def examined(path: Path) -> str:
    """Return the section of the doctor's findings."""
    rows = [f"| {one.check} | {one.outcome} | {one.text} |" for one in Findings.validate_json(path.read_bytes())]
    return "\n".join(["## The machine", "", "| check | outcome | finding |", "| --- | --- | --- |", *rows])


def section(path: Path = GPU) -> str:
    """Return the section as Markdown; without results, a sentence that says so."""
    if not path.exists():
        return _NONE
    found = Results.model_validate_json(path.read_bytes())
    parts = [TITLE, _machine(found), _TEXT, *_tables(found), _left_out(found.records)]
    return "\n\n".join(part for part in parts if part)


_TEXT = f"""One rank trains in bfloat16 with float32 master weights and AdamW, on sequences of 2,048 tokens, with blocks
recomputed. Weights, batches and clipping are the same for both stacks. Times are medians of {TIMED} steps, with the
quartiles in brackets.

- *hidden*: the share of the time of copies between host and device during which kernels run at the same time.
- *device*: the peak of the bytes of tensors. *pinned*: the pinned host memory, as torch's allocator rounds it up.
- *forecast*: the time that `pseudoreal plan` predicts from speeds measured in the same run, with its error in brackets.
- fully_shard offloads by `CPUOffloadPolicy` with pinned memory. It copies all weights again for each of the n
  micro-batches, so it is also timed with a single micro-batch."""


_NEAR = 0.2
"""Largest relative error of a prediction that counts as near."""


def claim(found: Results) -> Claim:
    """Return the claim of the results: pairs of steps on the same home and batch, each stack with its best number of
    micro-batches, and the predictions."""
    machine, best = found.machine, dict[tuple[str, str, str, int], float]()
    for record in found.records:
        for one in record.measured:
            key = record.case.stack, record.case.model, record.case.home, one.point.tokens
            best[key] = min(one.median, best.get(key, one.median))
    factors = [
        theirs / seconds
        for (stack, model, home, tokens), seconds in best.items()
        if stack == "pseudoreal" and (theirs := best.get(("fully_shard", model, home, tokens)))
    ]
    won = [factor for factor in factors if factor >= 1]
    errors = {
        f"{record.case.label}, {one.point.tokens:,} tokens, n = {one.point.micro_batches}": one.forecast.seconds
        / one.median
        - 1
        for record in found.records
        for one in record.measured
        if one.forecast is not None
    }
    near, worst = [error for error in errors.values() if abs(error) <= _NEAR], max(errors, key=lambda k: abs(errors[k]))
    range_of_won = f"{min(won):.2f}× to {max(won):.2f}×" if won else "none"
    lost = (f"{len(factors) - len(won)} of {len(factors)} comparisons with fully_shard; the worst factor is"
            f" {min(factors):.2f}×",)  # fmt: skip
    far = (f"the worst prediction is off by {errors[worst]:+.0%} ({worst})",)
    return Claim(
        subject="A training step on a GPU",
        page=pages.GPU.name,
        against=f"torch {machine.versions['torch']} (fully_shard, with CPUOffloadPolicy for the state on the host)",
        result=(
            f"with the same home and batch, faster than fully_shard in {len(won)} of {len(factors)} comparisons, each"
            f" stack with its best number of micro-batches: {range_of_won}",
            f"{len(near)} of {len(errors)} predicted times of a step are within {_NEAR:.0%} of the measured time",
        ),
        loses=(*(lost if len(won) < len(factors) else ()), *(far if len(near) < len(errors) else ())),
        measured=f"{machine.date[:10]}, at commit {machine.commit[:9]}, on {machine.device}, {machine.cores} cores",
        release=release(),
        in_readme=range_of_won,
    )


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
        f"| {case.stack}, {case.home}, {case.settings} | {one.point.tokens:,} | {one.point.micro_batches} |"
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
