"""Write docs/method.md: tables and plots. The conclusions are written by people, in verdict.md."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.method import experiments as ex
from benchmarks.method import pictures
from benchmarks.method.lives import Life
from benchmarks.method.summary import Pace, bump, final_loss, first_at, points, spread

REPORT = Path("docs/method.md")
DATA = Path("docs/data/method.csv")
VERDICT = Path(__file__).with_name("verdict.md")
IMAGES = REPORT.parent / "images"
_Group = tuple[str, Sequence[Life]]


def write_report(lives: list[Life]) -> None:
    pace = _pace(lives)
    by_name: dict[str, list[Life]] = {}
    for life in lives:
        by_name.setdefault(life.experiment, []).append(life)
    parts = ["# Does pseudo-to-real training pay?", VERDICT.read_text().strip(), _setting(lives)]
    parts += [_section(title, names, by_name, pace) for title, names in _SECTIONS.items() if names[0] in by_name]
    parts.append(_correlations(by_name))
    REPORT.write_text("\n\n".join(part for part in parts if part) + "\n")
    write_points(lives, pace)


def write_points(lives: Sequence[Life], pace: Pace) -> None:
    """Write every validation of every seed, so that means can be checked and others computed."""
    DATA.parent.mkdir(parents=True, exist_ok=True)
    with DATA.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["experiment", "seed", "step", "tokens", "seconds", "validation_loss"])
        for life in lives:
            for point in points(life):
                seconds = f"{pace.at(life, point.step):.2f}"
                table.writerow([life.experiment, life.seed, point.step, point.tokens, seconds, f"{point.loss:.5f}"])


def _pace(lives: list[Life]) -> Pace:
    """Return the pace of each kind of step, from all results of a regime together."""
    regimes = {experiment.name: experiment.regime for experiment in ex.EXPERIMENTS}
    seconds: dict[tuple[str, str], list[float]] = {}
    for life in lives:
        for phase in life.phases:
            seconds.setdefault((regimes[life.experiment], phase.name), []).append(phase.seconds_per_step)
    return Pace(
        {
            (life.experiment, phase.name): median(seconds[regimes[life.experiment], phase.name])
            for life in lives
            for phase in life.phases
        }
    )


_SECTIONS: dict[str, list[str]] = {
    title: [experiment.name for experiment in group]
    for title, group in {
        "When to delink": [ex.UNSHARED, ex.SHARED, *ex.SHARES, ex.POLICIES[0]],
        "What becomes of the optimizer's state": [ex.UNSHARED, *ex.POLICIES, *ex.WARMED],
        "How many blocks": [ex.UNSHARED, ex.POLICIES[0], *ex.BLOCKS],
        "The learning rate": [ex.UNSHARED, ex.POLICIES[0], *ex.RATES],
        "When a real step costs more": ex.OFFLOADED,
    }.items()
}
_IMAGE_NAMES = ("shares", "policies", "blocks", "rates", "offload")
_COLUMNS = (
    "",
    "validation loss",
    "steps",
    "seconds",
    "reaches the first row's loss at step",
    "after seconds",
    "the first row has this loss at step",
    "bump, nats",
    "its steps",
    "peak MiB",
)


def _setting(lives: list[Life]) -> str:
    return f"""Written by `make bench-method`: {len(lives)} trainings with the engine itself, {len(ex.SEEDS)} seeds each
(mean ± standard deviation), on the King James Bible, byte by byte; the same order of samples, AdamW, one cosine
schedule to the end of each job. Trained {_when(lives)}. Every validation of every seed:
[data/method.csv](data/method.csv).

- Where a real step costs as much as a pseudo one: 12 layers of width 96, {ex.STEPS} steps of
  {ex.tokens_of_a_step("equal"):,} tokens, learning rate {ex.RATE}, one block in the pseudo phase where nothing else is
  said. Validation is over one sample of {ex.validation_bytes("equal"):,} bytes.
- Where it costs more: width 384, state on disk, steps of {ex.tokens_of_a_step("offload")} tokens (the unshared job has
  {ex.OFFLOAD_STEPS * ex.tokens_of_a_step("offload"):,} in all), learning rate 1e-3. Validation is over one sample of
  {ex.validation_bytes("offload"):,} bytes.
- *Shared throughout*: one block to the end, never delinked. What it reaches in the same seconds is what a delink has to
  beat.

Seconds are the median of each kind of step, times steps. *Bump*: how far validation rises above what it was at the
delink, and for how many steps. Peak: memory of the process beyond what it had before training, of the pseudo and of the
real phase. Thin lines in the pictures are single seeds."""


def _when(lives: Sequence[Life]) -> str:
    """Return dates and commits, oldest first."""
    return ", ".join(
        dict.fromkeys(f"on {life.date} at {life.commit}" for life in sorted(lives, key=lambda life: life.date))
    )


def _section(title: str, names: list[str], by_name: dict[str, list[Life]], pace: Pace) -> str:
    groups = [(name, by_name[name]) for name in names if name in by_name]
    image = IMAGES / f"method-{_IMAGE_NAMES[list(_SECTIONS).index(title)]}.svg"
    start = points(groups[0][1][0])[0].loss
    pictures.losses(groups, pace, image, top=min(start, 3.2))
    rows = "\n".join(_row(group, groups[0], pace) for group in groups)
    head = f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}"
    return f"## {title}\n\n{head}\n{rows}\n\n![{title}](images/{image.name})"


def _row(group: _Group, reference: _Group, pace: Pace) -> str:
    name, lives = group
    loss, deviation = spread([final_loss(life) for life in lives])
    target = mean(final_loss(life) for life in reference[1])
    reached = [first_at(life, target) for life in lives]
    seconds = [None if step is None else pace.at(life, step) for life, step in zip(lives, reached, strict=True)]
    same = [first_at(life, loss) for life in reference[1]]
    last = mean(points(life)[-1].step for life in lives)
    cells = [
        name,
        f"{loss:.3f} ± {deviation:.3f}",
        f"{last:.0f}",
        f"{mean(pace.at(life, points(life)[-1].step) for life in lives):.0f}",
        _mean_or_never(reached),
        _mean_or_never(seconds),
        _mean_or_never(same),
        *_bump_cells(lives),
        " / ".join(
            f"{median(life.phases[i].peak_bytes for life in lives) / 2**20:.0f}" for i in range(len(lives[0].phases))
        ),
    ]
    return f"| {' | '.join(cells)} |"


def _bump_cells(lives: Sequence[Life]) -> tuple[str, str]:
    if len(lives[0].phases) == 1:
        return "", ""
    bumps = [bump(life) for life in lives]
    return f"{mean(found.height for found in bumps):.3f}", _mean_or_never([found.steps for found in bumps])


def _mean_or_never(values: Sequence[float | None]) -> str:
    """Return the mean of the existing values, with their number unless all exist; "never" if none exists."""
    there = [value for value in values if value is not None]
    if not there:
        return "never"
    return f"{mean(there):.0f}" + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def _correlations(by_name: dict[str, list[Life]]) -> str:
    """Return the section on correlations measured by the adaptive rule with the first seed."""
    lives, whole = (by_name.get(experiment.name, []) for experiment in (ex.ADAPTIVE, ex.NEVER_ENDED))
    if not lives or not whole:
        return ""
    rows = "\n".join(
        f"| {step} | {min(found):.2f} | {median(found):.2f} | {max(found):.2f} |"
        for step, found in whole[0].phases[0].correlations.items()
    )
    ends = ", ".join(str(life.phases[1].first_step - 1) for life in lives)
    return f"""## Correlations of neighbouring layers' gradients

In the pseudo phase of *adaptive (0.5)*, which the rule never ended; *adaptive (0.99)* ended at steps {ends}.

| step | lowest | median | highest |
| --- | --- | --- | --- |
{rows}"""
