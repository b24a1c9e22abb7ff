"""The first half page of docs/method.md: answers by the rules of the plan, sentence by sentence from the data. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.method.analysis import Comparison, Kind, Trial
from benchmarks.method.tables import joined, named, number, spans, table

_WORDS = """The *speed-up per token* is computed as the speed-up in seconds, but with numbers of tokens in place of
seconds. A speed-up is computed for each seed; the tables have the mean over the seeds. The sign † marks an arm whose
final loss is higher than the final loss of unshared training, as the mean over seeds. For a seed whose arm ends with a
higher loss, both trainings are compared at the final loss of the arm, which unshared training reaches before its end.
So a speed-up with † does not say when, or whether, the arm reaches the final loss of unshared training.

A step computes, and moves the bytes of weights and moments at the same time. So its *cost* is the time of its computing
or the time in which its bytes are moved, whichever is longer. The *cost ratio* is the cost of a real step divided by
the cost of a pseudo step that does not wait for bytes. It is 1 if a real step does not wait for its bytes either, and
above 1 if a real step waits.

Arms are compared with unshared training seed by seed. The tables have the 95 % interval over the seeds in brackets. A
*verdict* compares the interval of an arm's speed-up with 1, which is unshared training, and with the mean speed-ups of
the controls. At a cost ratio, the verdict is "yes" if the interval of the speed-up in seconds lies above 1, above the
mean speed-up of each other arm shared throughout, and above the mean speed-up of each other grown arm. The verdict is
"no" if the interval lies below 1 or below the mean speed-up of another control. Otherwise, it is "open". Per token, the
interval is compared with 1 alone. There, an open verdict is called "level" if the mean difference of the losses is
below 0.01 nats."""
_NONE = "**Open: no arm and unshared training are trained with a seed in common yet.**"
_RATIOS = (1, 4)
"""Cost ratios of the first sentences: where nothing waits for bytes, and where experts of M6-10T do (`marks`)."""
_SPOKEN: tuple[Kind, ...] = ("delinked", "grown", "shared throughout")
_FASTEST = """These answers compare *arms*, which are ways to train. In *unshared training*, each layer has its own
weights from the first step to the last. A *delinked* arm shares weights (blocks or experts) between layers at first,
and ends the sharing by a delink. A *grown* arm starts with fewer layers, and adds the others by a growth. An *upcycled*
arm starts with fewer experts. An arm *shared throughout* shares weights to the end. *Controls* are the arms shared
throughout, the grown arms, and a *small model*, which is narrower than all others. The table names the fastest delinked
arm, grown arm, and arm shared throughout, with its *speed-up in seconds*. This number is a ratio: the seconds that
unshared training needs for its final loss, divided by the seconds that the arm needs for the same loss. So above 1, the
arm is faster than unshared training. The *cost ratio* and the sign † are explained below the table."""
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
        if reservations := "\n".join(_reservations(one)):
            yield reservations
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
        "**How sure are the answers?** The models of the answers have at most"
        f" {max(one.parameters for one in leading):,} parameters ({planned} sizes of models were planned). They train"
        " on one text, and each arm trains with"
        f" {' to '.join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))} seeds. Seconds are computed from"
        f" operations and bytes, not measured. {arms} arms are compared by 95 % intervals, without a correction for"
        " multiple comparisons. So about one verdict in twenty may be wrong by chance."
    )


def _reservations(one: Comparison) -> Iterator[str]:
    if one.lacking:
        counts = joined(f"*{name}* {have} of {wanted}" for name, (have, wanted) in one.lacking.items())
        yield f"- **Provisional**: seeds are missing. Seeds with unshared training, of the planned ones: {counts}."
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
