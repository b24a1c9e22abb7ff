"""The first half page of docs/method.md: answers by the rules of the plan, sentence by sentence from the data. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.method import costs
from benchmarks.method.analysis import CONTROLS, RATIOS, Comparison, Trial, Verdict, ranges
from benchmarks.method.tables import joined, named, number, span, spans, table

_INTRODUCTION = """These are the answers of the registered trials, by the rules of their [plan](method-plan.md). An
*arm* is a way to train. Its speed-up says how much sooner it reaches the final loss of unshared training: 1.20 means
with 1.20 times fewer tokens, or in 1.20 times fewer seconds. *Controls* are the arms that share to the end, the arms
that grow, and the small model. The cost ratio is the cost of a real step divided by the cost of a pseudo step.
Numbers in brackets are 95 % intervals over seeds, paired by seed."""
_NONE = "**Open: no arm and unshared training are trained with a seed in common yet.**"
_VERDICTS: dict[Verdict, str] = {"yes": "Faster per token", "no": "Slower per token", "level": "Level", "open": "Open"}
_HEAD = (
    *("arm", "speed-up per token", "verdict per token", "loss difference, nats"),
    *("in seconds, yes at ratios", "no at ratios"),
)


def answers(leading: Sequence[Comparison]) -> Iterator[str]:
    """Yield the paragraphs. `leading`: one comparison of each study."""
    yield _INTRODUCTION
    if not leading:
        yield _NONE
    for comparison in leading:
        yield from _answer(comparison)


def _answer(one: Comparison) -> Iterator[str]:
    tokens = max(curve.full for curve in one.trials[0].curves.values())
    yield f"**{one.study.capitalize()}, {one.parameters:,} parameters without the embedding, {tokens:,} tokens:**"
    seconds = [f"- **In seconds**: {_seconds(one)}.", *_fastest(one), *_dearest(one)]
    yield "\n".join([*_provisional(one), *_per_token(one), *seconds, *_reservations(one)])
    shown = [trial for trial in one.trials if trial.arm.is_primary or trial.kind in CONTROLS]
    yield table(_HEAD, [_row(one, trial) for trial in shown])


def _provisional(one: Comparison) -> Iterator[str]:
    if one.lacking:
        counts = joined(f"*{name}* {have} of {wanted}" for name, (have, wanted) in one.lacking.items())
        yield f"- **Provisional**: seeds are missing. Pairs with unshared training, of those in the plan: {counts}."


def _per_token(one: Comparison) -> Iterator[str]:
    """Yield the arms with each verdict on the speed-up in tokens."""
    for verdict, words in _VERDICTS.items():
        yield f"- **{words}**: {named(trial.arm.name for trial in one.trials if one.per_token(trial) == verdict)}."


def _seconds(one: Comparison) -> str:
    """Return for which delinked arms and cost ratios the plan says yes."""
    found = [(trial.arm.name, spans(one, trial, "yes")) for trial in one.of_kind("delinked")]
    winners = [f"*{name}* at ratios {where}" for name, where in found if where]
    if winners:
        return f"**above unshared training and all controls lie {joined(winners)}**"
    if not found:
        return "**open: no delinked arm and unshared training have a seed in common yet**"
    pending = [(trial.arm.name, spans(one, trial, "open")) for trial in one.of_kind("delinked")]
    undecided = [f"*{name}* at ratios {where}" for name, where in pending if where]
    if undecided:
        return (
            "**no delinked arm is shown to lie above unshared training and all controls, at any cost ratio from 1 to"
            f" 20**; open: {joined(undecided)}"
        )
    return "**no delinked arm lies above unshared training and all controls, at any cost ratio from 1 to 20**"


def _fastest(one: Comparison) -> Iterator[str]:
    """Yield which arm has the highest mean speed-up in seconds, by cost ratio."""
    best, bounded = [], {}
    for ratio in RATIOS:
        speeds = {trial.arm.name: speed for trial in one.trials if (speed := trial.speed_up_in_seconds(ratio))}
        bounded = {name: speed for name, speed in speeds.items() if speed.at_most}
        known = [(speed.mean, name) for name, speed in speeds.items() if name not in bounded]
        best.append((ratio, max([(1.0, "unshared"), *known])[1]))
    found = {name: joined(span(*ends) for ends in ranges(best, name)) for _, name in best}
    fastest = joined(f"*{name}* at ratios {where}" for name, where in found.items())
    yield f"- Highest mean speed-up in seconds: {fastest}."
    if bounded:
        yield f"- Not ranked there, because only an upper bound is known: {named(bounded)}."


def _dearest(one: Comparison) -> Iterator[str]:
    """Yield the cost ratios above which the bytes of the pseudo steps of an arm bound them."""
    by_limit: dict[str, list[str]] = {}
    for trial in sorted(one.trials, key=lambda trial: costs.largest_ratio(trial.shares) or RATIOS[-1]):
        limit = costs.largest_ratio(trial.shares)
        if limit is not None and limit < RATIOS[-1]:
            by_limit.setdefault(f"{limit:.2g}", []).append(trial.arm.name)
    if by_limit:
        found = joined(f"{limit} ({named(names)})" for limit, names in by_limit.items())
        yield f"- Bytes alone make a real step at most this many times as costly as a pseudo step: {found}."


def _reservations(one: Comparison) -> Iterator[str]:
    single = [trial.arm.name for trial in one.trials if len(trial.paired) == 1]
    if single:
        yield f"- One seed, no interval: {named(single)}."
    if one.missing_controls:
        names = named(one.missing_controls)
        yield f"- Controls that are not trained: {names}. Without one of each kind there is no yes in seconds."


def _row(one: Comparison, trial: Trial) -> list[str]:
    per_token = [number(trial.speed_up()), one.per_token(trial), number(trial.difference(), 4, sign=True)]
    return [trial.arm.name, *per_token, spans(one, trial, "yes") or "none", spans(one, trial, "no") or "none"]
