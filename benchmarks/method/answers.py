"""The first half page of docs/method.md: answers by the rules of the plan, sentence by sentence from the data. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.method.analysis import Comparison, Kind, Trial
from benchmarks.method.tables import joined, named, number, spans, table

_WORDS = """The *speed-up* of an arm is the number of tokens, or seconds, that unshared training needs for its final
loss, divided by the number that the arm needs for the same loss. The sign † marks an arm whose own final loss is
higher, as the mean over seeds. A seed with a higher final loss is compared at this higher loss, which unshared training
reaches earlier. So a speed-up with † does not say when, or whether, the arm reaches the final loss of unshared
training.

The *cost ratio* is the cost of a real step divided by the cost of a pseudo step. It is above 1 if a real step waits for
weights and moments, while a pseudo step only computes. The cost of any step is the time of its computing or the time in
which its bytes are moved, whichever is longer.

The verdicts compare 95 % intervals over seeds, paired by seed; the tables have these intervals in brackets. At a cost
ratio, an arm is a "yes" if the interval of its speed-up lies above 1 (unshared training), above the mean of each arm
that shares to the end, and above the mean of each arm that grows. It is a "no" if the interval lies below 1 or below
the mean of a control. Per token, the interval is compared with 1 alone. A verdict that is neither is "open", or "level"
if the mean difference of the losses is below 0.01 nats."""
_NONE = "**Open: no arm and unshared training are trained with a seed in common yet.**"
_RATIOS = (1, 4)
"""Cost ratios of the first sentences: where nothing waits for bytes, and where experts of M6-10T do (`marks`)."""
_SPOKEN: tuple[Kind, ...] = ("delinked", "grown", "shared throughout")
_FASTEST = """An *arm* is a way to train. *Controls* are the arms that share to the end, the arms that grow, and the
small model. The table names the fastest arm of each kind, with its speed-up in seconds, at two cost ratios. *Speed-up*
and *cost ratio* are defined below the table."""
_KINDS = ("study", "cost ratio", *_SPOKEN)
_HEAD = (
    *("arm", "seeds", "speed-up per token", "verdict per token", "loss difference, nats"),
    *("in seconds, yes at ratios", "no at ratios"),
)


def answers(leading: Sequence[Comparison]) -> Iterator[str]:
    """Yield the paragraphs. `leading`: one comparison of each study."""
    if leading:
        yield "\n".join(f"- **{one.study.capitalize()}: {_verdict(one)}.**" for one in leading)
        yield _FASTEST
        yield table(_KINDS, [_fastest(one, ratio) for one in leading for ratio in _RATIOS])
        yield _certainty(leading)
    else:
        yield _NONE
    yield _WORDS
    for one in leading:
        size = f"{one.parameters:,} parameters without the embedding, {one.tokens:,} tokens"
        yield f"**{one.study.capitalize()}, {size}:**"
        if notes := [*_provisional(one), *_reservations(one)]:
            yield "\n".join(notes)
        yield table(_HEAD, [_row(one, trial) for trial in one.trials])


def _verdict(one: Comparison) -> str:
    """Return for which delinked arms and cost ratios the plan says yes."""
    found = [(trial.arm.name, spans(one, trial, "yes")) for trial in one.of_kind("delinked")]
    winners = [f"*{name}* at cost ratios {where}" for name, where in found if where]
    if winners:
        return f"yes. Above unshared training and all controls lie {joined(winners)}"
    if not found:
        return "open. No delinked arm and unshared training have a seed in common yet"
    pending = [(trial.arm.name, spans(one, trial, "open")) for trial in one.of_kind("delinked")]
    undecided = [f"*{name}* at cost ratios {where}" for name, where in pending if where]
    if undecided:
        return (
            "no delinked arm is shown to lie above unshared training and all controls in speed-up, at any cost ratio"
            f" from 1 to 20; open: {joined(undecided)}"
        )
    return (
        "no. No delinked arm lies above unshared training and all controls in speed-up, at any cost ratio from 1 to 20"
    )


def _fastest(one: Comparison, ratio: int) -> list[str]:
    """Return a row with the fastest arm of each kind at a cost ratio."""
    found = []
    for kind in _SPOKEN:
        speeds = [(speed, t.arm.name) for t in one.of_kind(kind) if (speed := t.speed_up_in_seconds(ratio))]
        speed, name = max(speeds, key=lambda each: each[0].mean, default=(None, ""))
        found.append(f"*{name}*: {number(speed)}" if speed else "not trained")
    return [one.study, str(ratio), *found]


def _certainty(leading: Sequence[Comparison]) -> str:
    """Return how far the answers carry."""
    scale, arms = leading[0].scale, sum(len(one.trials) for one in leading)
    planned = max(len(scale.sizes[one.study]) for one in leading)
    seeds = sorted({len(trial.paired) for one in leading for trial in one.trials})
    return (
        f"**How sure**: the models have at most {max(one.parameters for one in leading):,} parameters ({planned} sizes"
        " were planned), and train on one text with"
        f" {' to '.join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))} seeds. Seconds are computed from"
        f" operations and bytes, not measured. {arms} arms are compared by 95 % intervals, without a correction for"
        " multiple comparisons. So about one verdict in twenty may be chance."
    )


def _provisional(one: Comparison) -> Iterator[str]:
    if one.lacking:
        counts = joined(f"*{name}* {have} of {wanted}" for name, (have, wanted) in one.lacking.items())
        yield f"- **Provisional**: seeds are missing. Seeds with unshared training, of the planned ones: {counts}."


def _reservations(one: Comparison) -> Iterator[str]:
    single = [trial.arm.name for trial in one.trials if len(trial.paired) == 1]
    if single:
        yield f"- One seed, no interval: {named(single)}."
    if one.missing_controls:
        names = named(one.missing_controls)
        yield f"- Controls that are not trained: {names}. Without a control of each kind, no arm is a yes in seconds."


def _row(one: Comparison, trial: Trial) -> list[str]:
    per_token = [number(trial.speed_up()), one.per_token(trial), number(trial.difference(), 4, sign=True)]
    verdicts = [spans(one, trial, "yes") or "none", spans(one, trial, "no") or "none"]
    return [trial.arm.name, str(len(trial.paired)), *per_token, *verdicts]
