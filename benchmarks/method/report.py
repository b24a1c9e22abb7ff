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

_READING = """\
The picture has a panel for each study. Each line shows the speed-up in seconds of an arm, with its 95 % interval as a
band. An arm with one seed has no band. A line is dashed if the arm ends with a higher loss than unshared training (†),
or if only a bound of the speed-up of the arm is known. In the range of cost ratios in which real steps wait for bytes
and pseudo steps do not, the line of an arm that shares weights rises. The line stops rising at the cost ratio at which
moving the bytes of a pseudo step takes as long as the computing of this step. Above this cost ratio, pseudo steps wait
for bytes, too: a still higher cost ratio makes real and pseudo steps slower by the same factor, so the line stays
level.

This page states the cost of a step as a share of the cost of a step of unshared training. This share of the cost is the
larger of two numbers. The first number is the share of operations, divided by the cost ratio. (The share of operations
is the number of operations of the step, divided by the number of operations of a step of unshared training.) The second
number is the share of bytes: the number of bytes of the state, divided by the number of bytes of the state in unshared
training. The share of operations and the share of bytes count the layers alone, without embedding and head. But
embedding and head take time, too, so a phase with few layers saves less time than the share of operations suggests. For
instance, for the job of 124 M parameters in the table below, the planner predicts that a step with 4 of 12 layers takes
0.67 times as long as a real step. The share of operations of this step is 0.33.

The dotted vertical lines of the picture are *marks*. Each mark stands at the cost ratio of one job on one machine. For
a mark, the cost ratio is the seconds of a step of the job's last phase, divided by the seconds of a step of the job's
first phase. If the phases of the job have different layouts, this cost ratio shows the effect of sharing and of the
layouts together. A mark with a cost ratio below 1 is in the following table, but not in the picture."""
_SETTING = """\
- The seconds in speed-ups are not measured. These seconds are computed from operations, bytes and a cost ratio, which
  stands for the speeds of a machine.
- The measured seconds of the trials are not compared, because other programs ran on the machine at the same time.
- The memory that the arms need is not compared, because the models are too small to show differences between the arms.
- The value of `delink.optimizerState` decides which optimizer moments the copies of a block get. The trials compare the
  values of `delink.optimizerState` on no more than one arm of each study. The trials do not try the trigger
  `until.gradientCorrelation`, or a state on disk. Smaller [earlier trials](method-earlier.md) compare the values of
  `delink.optimizerState` for other arms, and try `until.gradientCorrelation` and a state on disk."""
_RATES = """\
Separate trainings chose the peak learning rate of each arm. The separate trainings have another seed than the trainings
of the compared arms, and read other documents. The table has the validation losses of the separate trainings. First,
separate trainings with half of the full budget (half as many tokens as the longest trainings) compare several rates.
Then separate trainings with the full budget compare the best of these rates with lower rates. The rate with the lowest
loss at the full budget is chosen; this loss is bold.

Some arms are not in the table, because these arms take the peak learning rate of another arm. An arm that is delinked
at 10 % or 50 % takes the rate of the arm that shares the same weights and is delinked at 30 %. *1, 4, 12 blocks* takes
the rate of *4 blocks, delinked at 30 %*."""
_REMEDIES = """\
Publications propose changes of the first phase, and of the transition to the next phase, that may lower the final loss
of a delinked arm. In each study, all changes were tried on one delinked arm, the *base* of the changes. Each change was
planned with three seeds. Some changes need an explanation:

- *Rates of each phase, warmed up again*: the first phase has the peak learning rate of the arm that is shared
  throughout. The second phase has the peak learning rate of unshared training. At the start of the second phase, the
  learning rate rises from zero to this peak (a second warm-up).
- *Noise*: at the delink, noise is added to each copy of a block (or of a set of experts) except the first copy. The
  noise is a tenth of freshly drawn initial weights (`delink.noise: "0.1"`).
- *Measured* and *Reset* are values of `delink.optimizerState`, which says which optimizer moments the copies get.
- *Middle half shared*: in the first phase, the middle half of the layers share one block, and each of the other layers
  has its own block.
- *All but norms shared*, *blocks but routers and norms*: in the first phase, all layers share one block, but each layer
  has its own norms, and its own router if the layer has experts.

A job cannot share weights as in the last two items of the list. So a plain PyTorch loop trains the arms of these two
items (`benchmarks/method/plain.py`)."""
_MEMORY = """\
In the tables, a loss is the mean over the seeds of an arm. The arms have different numbers of seeds, so do not compare
two arms by their losses. Use the columns of differences, which compare each arm with unshared training with the same
seeds. A *difference at equal tokens* is the final loss of an arm minus the final loss of unshared training with the
same seed, as the mean over the seeds. A difference *at equal operations* is the final loss of the arm minus the loss
that unshared training has after as many operations as the whole training of the arm takes. Differences *at equal bytes*
and *at equal seconds* are computed in the same way, with bytes and seconds in place of operations. Arms have different
costs, so the columns *at equal operations*, *at equal bytes* and *at equal seconds* compare each arm with unshared
training at a different number of tokens. So compare a cell of these three columns only with 0, and not with the cell of
another arm. In a column of losses, a dash means that the arm was not trained with the budget of this column. In a
column of differences, a dash means that the whole training of the arm costs less than unshared training with its
smallest budget.

A *stage* is a phase of an arm. A *share* is a number of operations or bytes, divided by the number of operations or
bytes of unshared training. A share counts the layers alone, without embedding and head. The state of a layer is its
float32 master weights and the two moments of AdamW. *Memory* is how much the memory of the process grows in the last
stage of an arm. The tables do not have the memory of the first stage of a delinked arm. In its first stage, a delinked
arm takes as much memory as the arm that shares the same weights throughout."""


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
        "The [plan](method-plan.md) was committed before the first training whose result this page uses. The trials"
        " and this page differ from the plan in these points:",
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
        shown = [f"{tokens:,} tokens at {percent(budget)} of the full budget" for budget, tokens in windows]
        yield (
            f"- Without the embedding, the models have at most {largest:,} parameters. The models train on at most"
            f" {most:,} tokens."
        )
        same = len({tokens for _, tokens in windows}) == 1
        over = f"{windows[0][1]:,} tokens at each budget" if same else joined(shown)
        yield f"- A validation loss is the mean loss over tokens of the validation text: {over}."
        if len({tokens for _, tokens in windows}) > 1:
            yield (
                "- Losses at two budgets are measured on different parts of the validation text; at one budget, all"
                " arms have the same part. So losses at equal tokens can be compared. But the slope of a curve between"
                " two budgets has an error that all seeds share, and that no interval of a speed-up shows."
            )
    devices = joined(sorted({"a CPU" if r.device == "cpu" else r.device for r in results})) or "a CPU"
    yield (
        f"- All trials use one text and one vocabulary, and run in {scale.precision} on {devices}. In the last phase,"
        " all models without experts have the same form, and differ only in their width. All models with experts also"
        " have the same form in the last phase, and differ only in their width."
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
        "A *difference* is the final loss of an arm minus the final loss of unshared training with the same seed and"
        " as many tokens. The table has the mean difference at each size of model, and the slope of a line that is"
        " fitted to the differences at all sizes. The slope is the change of the difference when the number of"
        " parameters doubles. With two sizes, the line always goes through both mean differences. So the interval of"
        " the slope shows only how much the results of the seeds differ. Peak learning rates were chosen at width"
        f" {scale.tuned_width} only. Models of another width train with the same rates, which may not be the best rates"
        " for these models. So do not extrapolate the lines to larger models."
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
        dates = sorted({r.date for r in results})
        days = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
        yield "## How this page was made"
        yield (
            "`make bench-method` trains the arms of the plan that are not trained yet, and writes this page. The"
            f" trainings of this page ran {days}, with the programs of these commits:"
            f" {joined(_distinct_commits(results))}. A plus after a commit means that files of the working tree"
            " differed from the commit in some trainings. The losses of all trainings are in"
            f" [data/{RESULTS.name}](data/{RESULTS.name})."
        )


def _distinct_commits(results: Sequence[Result]) -> list[str]:
    """Return each commit once, with a plus if files differed from it in a training."""
    found = {r.commit for r in results}
    return sorted(commit for commit in found if f"{commit}+" not in found)
