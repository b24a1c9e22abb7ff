"""Write docs/method.md, its pictures, and the evidence for advice, from docs/data/method.csv.

Every sentence about results is built from the results by the rules of docs/method-plan.md. People write changes.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.method import arms, costs, pictures, tables
from benchmarks.method.analysis import (
    FAR,
    Comparison,
    Trial,
    comparisons,
    diverged,
    far_above,
    leading,
    remedies,
    trials,
)
from benchmarks.method.answers import answers
from benchmarks.method.arms import ARMS, SIZES, Scale, Study
from benchmarks.method.evidence import EVIDENCE, write_evidence
from benchmarks.method.law import fitted, points_of
from benchmarks.method.marks import Mark, marks
from benchmarks.method.results import RESULTS, Result
from benchmarks.method.tables import joined, percent
from benchmarks.method.trend import Trend, samples_of, trend

REPORT = Path("docs/method.md")
CHANGES = Path(__file__).with_name("changes.md")

_READING = """Bands are 95 % intervals; an arm with one seed has no band. A dashed line marks an arm that ends above
the final loss of unshared training (†), or whose speed-up is only a bound. A line stops rising at the cost ratio from
which moving the bytes of a pseudo step takes longer than its computing. Beyond this ratio, pseudo steps wait for bytes,
too, so more waiting makes real and pseudo steps slower by the same factor.

The cost of a step is relative to a step of unshared training. It is the share of the layers' operations, divided by the
cost ratio, or the share of the bytes of the layers' state, whichever is more. Embedding and head are left out. With
embedding and head, a phase with few layers saves less: for the job of 124 M parameters the planner predicts that a step
with 4 of 12 layers takes 0.67 times as long as a real step, and not 0.33 times.

The table below explains the dotted vertical lines of the picture above, the *marks*. Each mark stands at the cost ratio
of one job. A cost ratio below 1 is in the table, but not in the picture. Phases of one job may have different layouts,
so a cost ratio is not the effect of sharing alone:"""
_SETTING = """- Seconds are computed, not measured: from operations, bytes and a cost ratio, which stands for a machine.
- The measured seconds of the trials are not compared, because other programs ran on the same machine. Memory is not
  compared either: at this size it does not tell the arms apart.
- The treatments of the optimizer's moments at the delink are compared for one arm of each study at most. The trigger
  `until.gradientCorrelation` and a state on disk are not compared. Smaller [earlier trials](method-earlier.md) compare
  all three."""
_RATES = """The table has the validation losses of the trainings that choose the peak learning rate of an arm. These
trainings have a seed and a text of their own. First, trainings with half of the full budget compare several rates. Then
trainings with the full budget compare the best of these rates with lower ones; the loss of the chosen rate is bold. An
arm that is not listed takes the rate of a listed arm: an arm that is delinked at 10 % or 50 % takes the rate of the arm
that is delinked at 30 %, and *1, 4, 12 blocks* takes the rate of *4 blocks, delinked at 30 %*."""
_REMEDIES = """The literature names changes of the transition and of the first phase that may help. The trials tried
these changes on one arm of each study, the *base*. The plan has three seeds of each change. The table below has the
changes in the order of the plan:

- *Rates of each phase*: the first phase has the peak learning rate of the arm that shares throughout. The second phase
  has the peak learning rate of unshared training. Its learning rate rises from zero to this peak (a second warm-up).
- *Noise*: each copy but the first is mixed with a tenth of freshly drawn weights (`delink.noise: "0.1"`).
- *Measured* and *Reset* are values of `delink.optimizerState`, which says which optimizer moments the copies get.
- *Middle half shared*: the layers of the middle half share one block, and each other layer has its own block.
- *All but norms shared*, *blocks but routers and norms*: all layers share one block, but each layer has its own norms
  and routers.

A job cannot share as in the last two items, so a plain loop trains these arms (`benchmarks/method/plain.py`)."""
_MEMORY = """A loss is the mean over the seeds of its arm. Arms have different numbers of seeds, so compare arms by the
columns of differences only. A difference is the loss of an arm minus the loss of unshared training with the same seed,
as the mean over these pairs. At equal operations, bytes or seconds, an arm is compared with an unshared training that
costs as much as the arm. Each arm costs another amount, so compare such a cell with 0, and not with the cell of another
arm.

A share is relative to unshared training, and counts the layers alone. The state of a layer is its float32 master
weights and two AdamW moments. Memory is the growth of the memory of the process in the last stage of an arm. The first
stage of a delinked arm takes as much memory as the arm that shares throughout."""


def write_report(results: Sequence[Result], report: Path = REPORT, evidence: Path = EVIDENCE) -> None:
    """Write the page of the trials to `report`, its pictures to images/ beside the page, and the trials' speed-ups to
    `evidence`, which `pseudoreal advise` reads."""
    found, images = trials(results, scale=scale_of(results)), report.parent / "images"
    compared = leading(comparisons(found))
    drawn = marks() if compared else []
    if compared:
        pictures.draw_decision(compared, drawn, images / "method.svg")
    if found:
        pictures.draw_curves(found, images / "method-curves.svg")
    if lines := _lines(_trends(found)):
        pictures.draw_trends(lines, images / "method-trend.svg")
    report.write_text(document(results, drawn))
    write_evidence(found, evidence)


def document(results: Sequence[Result], drawn: Sequence[Mark]) -> str:
    """Return docs/method.md. `drawn`: marks on the axis of the deciding picture."""
    scale = scale_of(results)
    found = trials(results, scale=scale)
    compared = comparisons(found)
    parts = [
        "# Does pseudo-to-real training pay?",
        *answers(leading(compared)),
        *_decision(leading(compared), drawn),
        "## The plan, and what changed against it",
        "The [plan](method-plan.md) was committed before the first training whose result counts.",
        CHANGES.read_text().strip(),
        "## Limits",
        "\n".join(_limits(results, scale)),
        "## Peak rates",
        _RATES,
        tables.rates(results, scale),
        *_losses(found, compared),
        *_remedies(results, scale),
        "## The worth of a repeated block",
        tables.fit(fitted(points_of(found)), found),
        *_trend(_trends(found), scale),
        "## Not trained",
        tables.not_trained(results, scale),
        *_dates(results),
    ]
    return "\n\n".join(parts) + "\n"


def scale_of(results: Sequence[Result]) -> Scale:
    """Return the scale of the trials: that of a GPU, with the studies trained, by their width."""
    studies = {r.study for r in results if r.width == arms.GPU.tuned_width}
    if not studies:
        return arms.REGISTERED
    chosen = {study: arms.GPU.arms[study] for study in arms.GPU.arms if study in studies}
    return replace(arms.GPU, arms=chosen, sizes={study: arms.GPU.sizes[study] for study in chosen})


def _decision(compared: Sequence[Comparison], drawn: Sequence[Mark]) -> Iterator[str]:
    if compared:
        yield "![Speed-up in seconds of each arm against the cost ratio, with bands](images/method.svg)"
        yield _READING
        yield tables.marks(drawn)


def _limits(results: Sequence[Result], scale: Scale) -> Iterator[str]:
    compared = [r for r in results if r.role == "compared"]
    if compared:
        largest, most = max(arms.parameters(r.study, r.width) for r in compared), max(r.tokens for r in compared)
        windows = sorted({(r.budget, r.validation_tokens) for r in compared})
        shown = [f"{tokens:,} at {percent(budget)} of the tokens" for budget, tokens in windows]
        yield (
            f"- The models have at most {largest:,} parameters without the embedding, and train on at most {most:,}"
            " tokens."
        )
        same = len({tokens for _, tokens in windows}) == 1
        yield f"- Validation tokens: {f'{windows[0][1]:,} at each budget' if same else joined(shown)}."
        if len({tokens for _, tokens in windows}) > 1:
            yield (
                "- Budgets are measured on different parts of the validation text, the same for all arms. So losses at"
                " equal tokens compare, but the slope of a curve between two budgets has an error that all seeds share,"
                " and that no interval of a speed-up shows."
            )
    devices = joined(sorted({"a CPU" if r.device == "cpu" else r.device for r in results})) or "a CPU"
    yield (
        f"- All trials use one text and one vocabulary, and run in {scale.precision} on {devices}. There is one shape"
        " of model without experts, and one with experts."
    )
    yield _SETTING
    if failed := diverged(results):
        yield f"- Diverged, and left out: {_runs(failed)}."
    if far := far_above(results):
        yield f"- More than {FAR:g} nat above the median of their size and budget, and not left out: {_runs(far)}."


def _runs(results: Sequence[Result]) -> str:
    names = {f"{r.study}, width {r.width}, {r.arm}, seed {r.seed}, rate {r.rate:g}" for r in results}
    return "; ".join(sorted(names))


def _losses(found: Sequence[Trial], compared: Sequence[Comparison]) -> Iterator[str]:
    yield "## Losses, speed-ups and costs"
    if not found:
        yield "No compared arm is trained yet."
        return
    yield _MEMORY
    yield "![Loss against tokens of each arm](images/method-curves.svg)"
    for size, own in _by_size(found).items():
        yield f"### {size}: losses"
        yield tables.losses(own)
        for one in compared:
            if one.trials[0] in own:
                yield f"### {size}: speed-ups"
                yield tables.speed_ups(one)
        yield f"### {size}: operations, bytes and memory"
        yield tables.costs_of(own)


def _by_size(found: Sequence[Trial]) -> dict[str, list[Trial]]:
    sizes: dict[str, list[Trial]] = {}
    for trial in found:
        sizes.setdefault(f"{trial.study.capitalize()}, {trial.parameters:,} parameters", []).append(trial)
    return sizes


def _remedies(results: Sequence[Result], scale: Scale) -> Iterator[str]:
    if scale.remedies:
        yield "## What else was tried"
        yield _REMEDIES
        yield tables.remedies(remedies(results, scale))


def _trend(slopes: dict[Study, dict[str, Trend | str]], scale: Scale) -> Iterator[str]:
    yield "## Trend with the size"
    yield (
        "The table has the final loss of an arm minus the final loss of unshared training with the same seed and as"
        " many tokens, and the slope of a line through these differences. A line through two sizes always fits, so the"
        " interval of its slope shows the scatter of the seeds alone. Peak learning rates were chosen at width"
        f" {scale.tuned_width} only. Models of another width train with the same rates, which may not be the best for"
        " them. Do not extrapolate."
    )
    yield tables.trends(slopes)
    if _lines(slopes):
        yield "![Differences by size, with lines through them](images/method-trend.svg)"


def _trends(found: Sequence[Trial]) -> dict[Study, dict[str, Trend | str]]:
    slopes: dict[Study, dict[str, Trend | str]] = {}
    for study in SIZES:
        own = [trial for trial in found if trial.study == study]
        for arm in ARMS[study]:
            samples = samples_of(own, arm.name)
            if arm is not costs.unshared(study) and len(samples) > 1:
                slopes.setdefault(study, {})[arm.name] = trend(samples)
    return slopes


def _lines(slopes: dict[Study, dict[str, Trend | str]]) -> dict[Study, dict[str, Trend]]:
    """Return the lines of the arms that carry the conclusion."""
    lines: dict[Study, dict[str, Trend]] = {}
    for study, own in slopes.items():
        for arm in ARMS[study]:
            line = own.get(arm.name)
            if arm.is_primary and isinstance(line, Trend):
                lines.setdefault(study, {})[arm.name] = line
    return lines


def _dates(results: Sequence[Result]) -> Iterator[str]:
    if results:
        dates, commits = sorted({r.date for r in results}), sorted({r.commit for r in results})
        days = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
        yield (
            f"`make bench-method` writes this page. The arms were trained {days}, at commits {joined(commits)}. A plus"
            " after a commit means that files differed from the commit. All figures are in"
            f" [data/{RESULTS.name}](data/{RESULTS.name})."
        )
