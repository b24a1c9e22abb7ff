"""Write docs/method.md, its pictures and the evidence for advice, from docs/data/method.csv.

Every sentence follows from the results by the rules of docs/method-plan.md; people write only changes.md.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.method import arms, costs, pictures, tables
from benchmarks.method.analysis import CONTROLS, RATIOS, Comparison, Trial, comparisons, diverged, ranges, trials
from benchmarks.method.arms import ARMS, SIZES, Study
from benchmarks.method.evidence import EVIDENCE, write_evidence
from benchmarks.method.law import fitted, points_of
from benchmarks.method.marks import Mark, marks
from benchmarks.method.results import RESULTS, Result
from benchmarks.method.tables import number, spans
from benchmarks.method.trend import Trend, samples_of, trend

REPORT = Path("docs/method.md")
CHANGES = Path(__file__).with_name("changes.md")
_TITLE = "# Does pseudo-to-real training pay?"


def write_report(results: Sequence[Result], report: Path = REPORT, evidence: Path = EVIDENCE) -> None:
    """Write the page, its pictures beside it in images/, and the evidence."""
    images = report.parent / "images"
    found, drawn = trials(results), marks()
    text = document(results, found, drawn)
    if compared := first_sizes(comparisons(found)):
        pictures.draw_decision(compared, drawn, images / "method.svg")
    if found:
        pictures.draw_curves(found, images / "method-curves.svg")
    if lines := _lines(_trends(found)):
        pictures.draw_trends(lines, images / "method-trend.svg")
    report.write_text(text)
    write_evidence(found, evidence)


def document(results: Sequence[Result], found: Sequence[Trial], drawn: Sequence[Mark]) -> str:
    """Return docs/method.md. `found`: trials of the results."""
    compared = comparisons(found)
    return (
        "\n\n".join(
            [
                _TITLE,
                *_answers(compared),
                *_decision(compared, drawn),
                *_plan(results),
                *_details(results, found, compared),
            ]
        )
        + "\n"
    )


def first_sizes(compared: Sequence[Comparison]) -> list[Comparison]:
    """Return each study's comparison at the size of its plan that has all arms, if it is trained."""
    return [one for one in compared if one.width == SIZES[one.study][0].width]


def _answers(compared: Sequence[Comparison]) -> Iterator[str]:
    firsts = first_sizes(compared)
    yield (
        "Answers of the registered trials ([plan](method-plan.md)), by its rules, with 95 % intervals over paired seeds. The speed-up is to"
        " the final loss of unshared training with a rate of its own: 1.20 means 1.20 times fewer tokens, or seconds. The cost ratio is the"
        " cost of a real step divided by the cost of a pseudo step."
    )
    if not firsts:
        yield "**Open: no arm is trained yet with a seed that unshared training has, too.**"
    for one in firsts:
        yield _answer(one)


def _answer(one: Comparison) -> str:
    size, tokens = one.trials[0].parameters, max(c.full for c in one.trials[0].curves.values())
    head = f"**{one.study.capitalize()}, {size:,} parameters, {tokens:,} tokens**"
    lines = [
        f"- Per token, {_named(one, 'yes')} faster than unshared training; {_named(one, 'no')} slower; {_named(one, 'level')} level;"
        f" {_named(one, 'open')} open.",
        f"- In seconds, {_winners(one)}.",
        *_rivalry(one),
    ]
    rows = [_row(one, trial) for trial in one.trials if trial.arm.is_primary or trial.kind in CONTROLS]
    head_row = [
        "arm",
        "speed-up per token",
        "verdict",
        "loss difference, nats",
        "in seconds: yes at ratios",
        "no at ratios",
    ]
    missing = [] if not one.missing_controls else [f"Controls not trained: {', '.join(one.missing_controls)}."]
    return "\n\n".join([head, "\n".join(lines), tables.table(head_row, rows), *missing])


def _named(one: Comparison, verdict: str) -> str:
    names = [trial.arm.name for trial in one.trials if one.per_token(trial) == verdict]
    return (
        f"{len(names)} arms are ({'; '.join(names)})"
        if len(names) > 1
        else f"1 arm is ({names[0]})"
        if names
        else "no arm is"
    )


def _winners(one: Comparison) -> str:
    """Return for which delinked arms and cost ratios the plan says yes."""
    found = [
        f"*{trial.arm.name}* at ratios {spans(one, trial, 'yes')}"
        for trial in one.of_kind("delinked")
        if spans(one, trial, "yes") != "none"
    ]
    if not found:
        return "no delinked arm lies above unshared training and all controls, at any cost ratio from 1 to 20"
    return f"delinked arms lie above unshared training and all controls: {'; '.join(found)}"


def _rivalry(one: Comparison) -> Iterator[str]:
    """Yield which kind of arm has the highest mean speed-up in seconds, by cost ratio."""
    best = []
    for ratio in RATIOS:
        means = {
            trial: speed.mean for trial in one.trials if (speed := trial.speed_up(costs.by_seconds(ratio))) is not None
        }
        top = max(means, key=lambda trial: means[trial])
        best.append((ratio, top.arm.name if means[top] > 1 else "unshared"))
    names = [*dict.fromkeys(name for _, name in best)]
    shown = []
    for name in names:
        own = ranges(best, name)
        shown.append(f"*{name}* at {', '.join(f'{low:.2g} to {high:.2g}' for low, high in own)}")
    yield f"- The highest mean speed-up in seconds, by cost ratio: {'; '.join(shown)}."


def _row(one: Comparison, trial: Trial) -> list[str]:
    verdict = one.per_token(trial)
    seconds = [spans(one, trial, wanted) for wanted in ("yes", "no")]
    return [trial.arm.name, number(trial.speed_up()), verdict, number(trial.difference(), 4, sign=True), *seconds]


def _decision(compared: Sequence[Comparison], drawn: Sequence[Mark]) -> Iterator[str]:
    if first_sizes(compared):
        yield "![Speed-up in seconds of each arm against the cost ratio, with bands](images/method.svg)"
    yield (
        "Bands are intervals. Dashed: a bound, because unshared training has no budget small enough to be read. Dotted: cost ratios"
        " that bytes alone cannot make, because the pseudo steps' own bytes would take longer than their computing. Marks:"
    )
    yield tables.marks(drawn)


def _plan(results: Sequence[Result]) -> Iterator[str]:
    yield f"## The plan, and what changed against it\n\nThe [plan](method-plan.md) was committed before the first compared run.\n\n{CHANGES.read_text().strip()}"
    yield "\n".join(["## Limits", "", *_limits(results)])


def _limits(results: Sequence[Result]) -> Iterator[str]:
    compared = [r for r in results if r.role == "compared"]
    if compared:
        sizes = sorted({(arms.parameters(r.study, r.width), r.study) for r in compared})
        yield f"- At most {sizes[-1][0]:,} parameters without the embedding, and {max(r.tokens for r in compared):,} tokens; nothing here says how it is at a billion."
        windows = sorted({(r.budget, r.validation_tokens) for r in compared})
        yield f"- Validation tokens by budget: {', '.join(f'{budget:.0%}: {tokens:,}' for budget, tokens in windows)}. Where they differ, a curve between two budgets has an error that all arms and seeds share, and no interval shows."
    yield "- One text, one vocabulary, one shape of model for each study, float32 on a CPU, one thread beside another training."
    yield "- Seconds in the picture are priced, not measured: a cost ratio stands for a machine ([marks](#does-pseudo-to-real-training-pay))."
    failed = diverged(results)
    if failed:
        names = sorted({f"{r.study} {r.width}, {r.arm}, seed {r.seed}" for r in failed})
        yield f"- Diverged: {'; '.join(names)}."
    yield "- [Earlier trials](method-earlier.md) compared the optimizer's state at the delink, the adaptive trigger, and state on disk."


def _details(results: Sequence[Result], found: Sequence[Trial], compared: Sequence[Comparison]) -> Iterator[str]:
    yield f"## Peak rates\n\nValidation loss on another text by rate; the chosen one in bold.\n\n{tables.rates(results)}"
    if found:
        yield "## Losses\n\n![Loss against tokens of each arm](images/method-curves.svg)"
    for study, width in dict.fromkeys((trial.study, trial.width) for trial in found):
        own = [trial for trial in found if (trial.study, trial.width) == (study, width)]
        yield f"### Losses: {_of(own[0])}\n\n{tables.losses(own)}"
    for one in compared:
        yield f"### Speed-ups: {_of(one.trials[0])}\n\n{tables.speed_ups(one)}"
    for study in SIZES:
        own = [trial for trial in found if (trial.study, trial.width) == (study, SIZES[study][0].width)]
        if own:
            yield f"### Operations, bytes and memory: {_of(own[0])}\n\n{tables.costs_of(own)}"
    yield f"## The worth of a repeated block\n\n{tables.fit(fitted(points_of(found)), found)}"
    slopes = _trends(found)
    picture = "\n\n![Differences by size, with lines](images/method-trend.svg)" if _lines(slopes) else ""
    yield f"## Trend with the size\n\nLoss minus that of unshared training, paired by seed.\n\n{tables.trends(slopes)}{picture}"
    yield f"## Not trained\n\n{tables.not_trained(results)}"
    dates = sorted({r.date for r in results})
    if dates:
        yield f"Trained from {dates[0]} to {dates[-1]}; all figures: [data/method.csv](data/{RESULTS.name})."


def _of(trial: Trial) -> str:
    return f"{trial.study}, {trial.parameters:,} parameters"


def _trends(found: Sequence[Trial]) -> dict[Study, dict[str, Trend | str]]:
    slopes: dict[Study, dict[str, Trend | str]] = {}
    for study, known in ARMS.items():
        own = [trial for trial in found if trial.study == study]
        for arm in known:
            samples = samples_of(own, arm.name)
            if arm.is_primary and samples and arm is not costs.unshared(study):
                slopes.setdefault(study, {})[arm.name] = trend(samples)
    return slopes


def _lines(slopes: dict[Study, dict[str, Trend | str]]) -> dict[Study, dict[str, Trend]]:
    lines = {study: {name: one for name, one in own.items() if isinstance(one, Trend)} for study, own in slopes.items()}
    return {study: own for study, own in lines.items() if own}
