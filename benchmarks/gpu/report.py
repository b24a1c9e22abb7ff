"""Write docs/benchmarks/gpu.md: `python -m benchmarks.gpu.report RESULTS`."""

import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import claims, pages
from benchmarks.claims import Claim
from benchmarks.gpu.cases import TIMED, Case
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.results import DOCTOR_FILE, RESULTS_FILE, Measured, Record, Results, loss_differences
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
    if GPU.exists() and (made := claim(Results.model_validate_json(GPU.read_bytes()))) is not None:
        claims.put(made)
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
    return "\n".join(["## The machine", "", _DOCTOR, "", "| check | outcome | finding |", "| --- | --- | --- |", *rows])


_DOCTOR = """\
The [doctor](../gpus.md#try-a-machine-in-ten-minutes) checked the machine on which the benchmark ran. The finding of
*driver* has the index of the GPU, its name, the version of the driver, the memory, and the generation and width of the
PCIe link. The finding of *products* has the time of a product of matrices. The finding of *repeated steps* says how
long steps take with deterministic kernels, compared with the same steps with the usual kernels."""


def section(path: Path = GPU) -> str:
    """Return the section as Markdown; without results, a sentence that says so."""
    if not path.exists():
        return _NONE
    found = Results.model_validate_json(path.read_bytes())
    parts = [TITLE, _machine(found), _TEXT, *_tables(found), _left_out(found.records)]
    return "\n\n".join(part for part in parts if part)


_TEXT = f"""One rank trains in bfloat16 with float32 master weights and AdamW, on sequences of 2,048 tokens. Blocks are
recomputed in the backward pass. The compared programs (*stacks*) are pseudoreal and torch's fully_shard. Both programs
start with the same weights, and train on the same batches. *Global* and *PerUnit* are modes of clipping: *Global*
limits the norm of the whole gradient, *PerUnit* limits the norm of the gradient of each unit. *tokens* is the number of
tokens of a step, and n is the number of micro-batches of a step. Times are medians of {TIMED} steps, with the quartiles
in brackets.

- *hidden*: the share of the time of copies between host and device during which kernels also run.
- *device*: the peak of the memory that tensors take on the GPU. The brackets have the error of the forecast of this
  peak, relative to the measured peak. *pinned*: the pinned host memory of the process; torch's allocator rounds the
  size of each buffer up.
- *forecast*: the predicted milliseconds of a step. `pseudoreal plan` predicts the time of a step from speeds that were
  measured in the same run. In brackets is the error of this forecast, relative to the measured time.
- *host*: the peak of the resident memory of the process. With *Speculative* (`clipping.updates: Speculative`), the
  process keeps a second copy of the state.
- Gradients are clipped only if their norm is above 100, so the gradients of few steps are clipped.
- In rows with the home `Host`, fully_shard keeps the state in pinned host memory (`CPUOffloadPolicy`). With this
  policy, fully_shard copies all weights to the device again for each micro-batch, so fully_shard is also timed with a
  single micro-batch. With one rank, fully_shard copies on the CUDA stream of the passes, so almost no kernels run
  during these copies. (With several ranks, fully_shard copies weights before the passes need them.)
- DeepSpeed and plain torch were not timed. With the state on the device, plain torch may be faster than fully_shard.
- The model *1B* has 1.0 billion parameters, and the model *4B* has 4.0 billion. The vocabulary has 256 tokens, so that
  the head takes little time. While CPU threads of the stacks wait, they sleep and do not spin
  (`OMP_WAIT_POLICY=passive`), as in the pods of a job."""


_NEAR = 0.2
"""Largest relative error of a prediction that counts as near."""


def claim(found: Results) -> Claim | None:
    """Return the claim of the results; None without a comparison."""
    by_settings = {settings: _factors(found.records, settings) for settings in ("Global", "Global, Speculative")}
    factors = [factor for of_settings in by_settings.values() for factor in of_settings]
    if found.is_tiny or not factors:
        return None
    results = [
        f"with {_NAMES[settings]} and the state on the host, a step of pseudoreal is {_range(of_settings)} as fast as a"
        " step of fully_shard on the same batch; each program runs with the number of micro-batches that is fastest for"
        " it"
        for settings, of_settings in by_settings.items()
        if of_settings
    ]
    lost = sum(factor < 1 for factor in factors)
    slower = [f"pseudoreal is slower than fully_shard in {lost} of these {len(factors)} comparisons"] if lost else []
    machine = found.machine
    return Claim(
        subject="A training step on a GPU",
        page=pages.GPU.name,
        against=f"torch {machine.versions['torch']} (fully_shard with CPUOffloadPolicy)",
        result=tuple(results),
        loses=(*slower, *_more_memory(found.records)),
        misses=_predictions_far_off(found.records),
        measured=f"{machine.date[:10]}, at commit {machine.commit[:9]}, on {machine.device}, {machine.cores} cores",
        release=machine.release,
        in_readme=_range(by_settings["Global"]) if by_settings["Global"] else "",
    )


_NAMES = {"Global": "the default settings", "Global, Speculative": "`clipping.updates: Speculative`"}


def _factors(records: Sequence[Record], settings: str) -> list[float]:
    """Return the seconds of a step of fully_shard, divided by ours with these settings, for each batch with the state
    on the host. Both stacks have their best number of micro-batches among those measured. fully_shard is best with few,
    so a batch counts only if fully_shard was measured with one."""
    steps = [(r.case, one) for r in records if r.case.home == "Host" for one in r.measured]

    def best(stack: str, settings: str, model: str, tokens: int) -> float | None:
        return min(
            (
                one.median
                for case, one in steps
                if (case.stack, case.settings, case.model, one.point.tokens) == (stack, settings, model, tokens)
            ),
            default=None,
        )

    batches = {
        (case.model, one.point.tokens)
        for case, one in steps
        if case.stack == "fully_shard" and one.point.micro_batches == 1
    }
    pairs = [(best("fully_shard", "Global", *batch), best("pseudoreal", settings, *batch)) for batch in sorted(batches)]
    return [theirs / ours for theirs, ours in pairs if theirs and ours]


def _range(factors: Sequence[float]) -> str:
    return f"{min(factors):.2f}× to {max(factors):.2f}×"


def _predictions_far_off(records: Sequence[Record]) -> tuple[str, ...]:
    """Return a sentence for each prediction that is not near."""
    errors = {
        f"{record.case.label}, {one.point.tokens:,} tokens": one.forecast.seconds / one.median - 1
        for record in records
        for one in record.measured
        if one.forecast is not None and abs(one.forecast.seconds / one.median - 1) > _NEAR
    }
    return tuple(
        f"the predicted time of a step is {abs(error):.0%} {'above' if error > 0 else 'below'} the measured time"
        f" ({where}); the aim is a difference of at most {_NEAR:.0%}"
        for where, error in errors.items()
    )


def _more_memory(records: Sequence[Record]) -> list[str]:
    """Return a sentence about host memory, if we take more for the same model with the state on the host."""
    peaks: dict[str, int] = {}
    for record in records:
        if record.case.home == "Host":
            settings = _NAMES.get(record.case.settings, f"the settings {record.case.settings}")
            name = f"{record.case.stack} with {settings}"
            peaks[name] = max([peaks.get(name, 0), *(one.host_peak_bytes for one in record.measured)])
    theirs = peaks.get(f"fully_shard with {_NAMES['Global']}", 0)
    more = [f"{name} takes {peak / _GIB:.1f} GiB" for name, peak in peaks.items() if theirs and peak > theirs]
    said = f"with the state on the host, a process of {' and a process of '.join(more)} of host memory"
    return [f"{said}; a process of fully_shard takes {theirs / _GIB:.1f} GiB"] if more else []


def _machine(found: Results) -> str:
    machine = found.machine
    tiny = " **Tiny models: this tried the program and measured nothing.**" if found.is_tiny else ""
    has_disk_rows = any(record.case.home == "Disk" and record.measured for record in found.records)
    disk = f" In rows with the home `Disk`, the state was in a folder on {found.disk}." if has_disk_rows else ""
    return (
        f"The benchmark used one {machine.device} with driver {machine.driver}, torch {machine.versions['torch']},"
        f" {machine.cores} cores and {machine.memory_gib:.0f} GiB of memory.{disk} The benchmark ran at commit"
        f" {machine.commit[:12]} on {machine.date[:10]}, for {found.seconds:.0f} s.{tiny}"
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
        losses = ""
        if apart is not None:
            losses = f"\n\nIn the same step, the losses of the two stacks differ by at most {apart:.1e} (relative)."
        yield f"### {model}\n\n{_HEAD}\n" + "\n".join(rows) + losses


_COLUMNS = (
    *("stack, home, settings", "tokens", "n", "ms a step", "tokens/s", "hidden"),
    *("device, GiB", "host, GiB", "pinned, GiB", "forecast"),
)
_HEAD = f"| {' | '.join(_COLUMNS)} |\n| --- |{' ---: |' * (len(_COLUMNS) - 1)}"


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
        f" {device} | {one.host_peak_bytes / _GIB:.1f} | {one.pinned_bytes / _GIB:.1f} | {forecast} |"
    )


_NOT_MEASURED = "These cases were not measured. Each line ends with the reason:"


def _left_out(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        points = ", ".join(f"{point.tokens:,} tokens with n = {point.micro_batches}" for point in record.left_out)
        if points or record.problem:
            said = filter(None, (record.case.label, points, record.problem or "no time was left"))
            lines.append(f"- {': '.join(said)}.")
    return "\n".join([_NOT_MEASURED, "", *lines]) if lines else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
