"""Tables of docs/method.md. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite

from benchmarks.method import costs
from benchmarks.method.analysis import RATIOS, Comparison, Remedy, Trial, Verdict, comparisons, leading, ranges
from benchmarks.method.arms import BUDGETS, LAYERS, REGISTERED, Scale, Study
from benchmarks.method.costs import Price, stage_cost
from benchmarks.method.intervals import Estimate
from benchmarks.method.law import PUBLISHED, Fit, best_moment, moments, speed_up_at
from benchmarks.method.marks import Mark
from benchmarks.method.results import Result
from benchmarks.method.schedule import planned, rate_of, tuning_losses
from benchmarks.method.trend import Trend

_SHOWN_RATIOS = (1, 2, 5, 10, 20)
EQUAL_RATIO = 5
"""Cost ratio at which losses are compared at equal seconds."""
_MIB = 2**20
_SETTLED: tuple[Verdict, ...] = ("yes", "no")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def named(names: Iterable[str]) -> str:
    """Return names of arms, some of which have commas."""
    return joined(f"*{name}*" for name in names)


def joined(words: Iterable[str]) -> str:
    return ", ".join(words) or "none"


def span(low: float, high: float) -> str:
    return " to ".join(dict.fromkeys((f"{low:.2g}", f"{high:.2g}")))


def number(found: Estimate | None, digits: int = 2, sign: bool = False) -> str:
    """Return "mean (low to high)"; a bound has no interval. Ends that would be rounded to 1.00 get another digit, as 1
    decides the verdict on a speed-up. † marks arms that end above the loss of unshared training."""
    if found is None:
        return "–"
    if not sign and any(end is not None and f"{end:.{digits}f}" == "1.00" for end in (found.low, found.high)):
        digits += 1
    form, mark = f"{'+' if sign else ''}.{digits}f", "†" if found.ends_above else ""
    if found.at_most or found.at_least:
        bound = "about" if found.at_most and found.at_least else "at most" if found.at_most else "at least"
        return f"{bound} {found.mean:{form}}{mark}"
    ends = "one seed" if found.low is None else f"{found.low:{form}} to {found.high:{form}}"
    return f"{found.mean:{form}} ({ends}){mark}".replace("-", "−")


def spans(comparison: Comparison, trial: Trial, wanted: Verdict) -> str:
    """Return the ranges of cost ratios with this verdict, such as "2.1 to 20"; empty without any."""
    verdicts = [(ratio, comparison.in_seconds(trial, ratio)) for ratio in RATIOS]
    return ", ".join(span(*ends) for ends in ranges(verdicts, wanted))


def rates(results: Sequence[Result], scale: Scale = REGISTERED) -> str:
    """Return all rates that were tried, with the loss of each."""
    tuning = [r for r in results if r.role == "tuning"]
    if not tuning:
        return "No rate is tried yet."
    tried, rows = sorted({r.rate for r in tuning}), []
    for study, known in scale.arms.items():
        budgets = sorted({(r.width, r.budget) for r in tuning if r.study == study})
        for arm, (width, budget) in product(known, budgets):
            own = tuning_losses(study, arm.name, tuning, replace(scale, tuned_width=width), budget)
            if own:
                chosen = rate_of(study, arm.tuned_as, results, scale) if width == scale.tuned_width else None
                last = "" if width != scale.tuned_width else "not finished" if chosen is None else f"{chosen:g}"
                cells = [_rate_cell(own.get(rate), rate == chosen and budget == max(BUDGETS)) for rate in tried]
                rows.append([study, str(width), arm.name, percent(budget), *cells, last])
    return table(["study", "width", "arm", "budget", *(f"{rate:g}" for rate in tried), "chosen"], rows)


def _rate_cell(loss: float | None, is_chosen: bool) -> str:
    if loss is None:
        return ""
    text = f"{loss:.4f}" if isfinite(loss) else "diverged"
    return f"**{text}**" if is_chosen else text


def losses(trials: Sequence[Trial]) -> str:
    """Return losses and paired differences of the trials of one study and width."""
    budgets = sorted({budget for trial in trials for budget in trial.scale.budgets or trial.arm.budgets})
    head = ["arm", *(f"{percent(budget)} of the tokens" for budget in budgets), "difference at equal tokens",
            "at equal operations", "at equal bytes", f"at equal seconds, ratio {EQUAL_RATIO}", "seeds"]  # fmt: skip
    rows = []
    for trial in trials:
        curve = trial.mean_curve
        by_budget = {
            round(tokens / curve.full, 2): loss for tokens, loss in zip(curve.tokens, curve.losses, strict=True)
        }
        shown = [f"{by_budget[b]:.4f}" if b in by_budget else "–" for b in budgets]
        is_reference = trial.kind == "unshared"
        prices: tuple[Price, ...] = (costs.by_flops, costs.by_bytes, costs.by_seconds(EQUAL_RATIO))
        equal = [trial.difference(), *map(trial.difference_at_equal, prices)]
        cells = ["" if is_reference else number(one, 4, sign=True) for one in equal]
        rows.append([trial.arm.name, *shown, *cells, str(len(trial.curves))])
    return table(head, rows)


def speed_ups(comparison: Comparison) -> str:
    head = ["arm", "tokens", "verdict per token", "operations", "bytes",
            *(f"seconds, ratio {ratio}" for ratio in _SHOWN_RATIOS), "yes at ratios", "no at ratios"]  # fmt: skip
    rows = []
    for trial in comparison.trials:
        prices = [costs.by_flops, costs.by_bytes, *map(costs.by_seconds, _SHOWN_RATIOS)]
        shown = [number(trial.speed_up(price)) for price in prices]
        verdicts = [spans(comparison, trial, wanted) or "none" for wanted in _SETTLED]
        rows.append([trial.arm.name, number(trial.speed_up()), comparison.per_token(trial), *shown, *verdicts])
    return table(head, rows)


def costs_of(trials: Sequence[Trial]) -> str:
    """Return operations, bytes and memory of the trials of one study and width, stage by stage."""
    head = ["arm", "operations of a token by stage, layers (share)", "with the head", "state by stage, layers (share)",
            "all operations", "all bytes", "memory of the last stage, MiB"]  # fmt: skip
    rows = []
    for trial in trials:
        shares, width = trial.shares, trial.arm.width.get(trial.width, trial.width)
        stages = [stage_cost(trial.study, width, stage, trial.scale) for stage in trial.arm.stages]
        flops = [f"{one.flops:,} ({share.flops:.2f})" for one, share in zip(stages, shares, strict=True)]
        state = [f"{one.state_bytes:,} ({share.state:.2f})" for one, share in zip(stages, shares, strict=True)]
        totals = [costs.spending(shares, price).until(1) for price in (costs.by_flops, costs.by_bytes)]
        rows.append([
            trial.arm.name,
            ", ".join(flops),
            ", ".join(f"{one.flops + one.head_flops:,}" for one in stages),
            ", ".join(state),
            *(f"{total:.2f}" for total in totals),
            f"{trial.peak_bytes / _MIB:.0f}",
        ])  # fmt: skip
    return table(head, rows)


def remedies(found: Sequence[Remedy]) -> str:
    """Return the losses of remedies beside their base and unshared training."""
    if not found:
        return "None of them is trained yet."
    head = ["study", "arm", "base", "loss", "minus the base's", "minus unshared training's", "seeds"]
    rows = []
    for one in found:
        trial = one.trial
        loss, difference = f"{trial.loss().mean:.4f}", number(trial.difference(), 4, sign=True)
        seeds = str(len(trial.curves))
        rows.append(
            [trial.study, trial.arm.name, one.base.arm.name, loss, number(one.gain(), 4, sign=True), difference, seeds]
        )
    return f"{_of_remedies(found)}\n\n{table(head, rows)}"


def _of_remedies(found: Sequence[Remedy]) -> str:
    """Return which remedies help, by their intervals."""
    gains = {one.trial.arm.name: one.gain() for one in found}
    better = [name for name, gain in gains.items() if gain and gain.high is not None and gain.high < 0]
    worse = [name for name, gain in gains.items() if gain and gain.low is not None and gain.low > 0]
    differences = {one.trial.arm.name: one.trial.difference() for one in found}
    behind = [name for name, one in differences.items() if one and one.low is not None and one.low > 0]
    ahead = [name for name, one in differences.items() if one and one.high is not None and one.high < 0]
    single = [one.trial.arm.name for one in found if len(one.trial.curves) == 1]

    alone = f"\n- Arms with one seed, whose differences have no interval: {named(single)}." if single else ""
    return (
        "The following table has the final loss of each changed arm. For each changed arm, the table also has two"
        " differences with their 95 % intervals: the final loss of the changed arm minus the final loss of its base,"
        " and the final loss of the changed arm minus the final loss of unshared training with as many tokens. A"
        " difference is decided if its interval does not contain zero. The decided differences are:\n\n"
        f"- {_decided(better, 'a lower loss than its base')}.\n"
        f"- {_decided(worse, 'a higher loss than its base')}.\n"
        f"- {_decided(ahead, 'a lower loss than unshared training')}.\n"
        f"- {_decided(behind, 'a higher loss than unshared training')}.{alone}\n\n"
        "All other differences of the table are undecided. The intervals are wide, because each arm has few seeds."
    )


def _decided(names: Sequence[str], comparison: str) -> str:
    """Return a sentence on the arms with a decided difference. Its number says where a name with commas ends."""
    if not names:
        return f"No arm has {comparison}"
    return f"{len(names)} {'arm has' if len(names) == 1 else 'arms have'} {comparison}: {named(names)}"


def fit(found: Fit | str, trials: Sequence[Trial]) -> str:
    """Return the law with its worth of a repeated block, and the moments of the delink that it favours."""
    if isinstance(found, str):
        return found
    law = found.law
    ends = "one seed, no interval" if found.low is None else f"95 % interval {found.low:.2f} to {found.high:.2f}"
    edge = " (at the edge of what is searched)" if law.is_at_bound else ""
    text = (
        "A law of the literature (arXiv 2604.21106) says how much a block is worth if several layers use it. By the"
        " law, the loss L after D tokens is L = E + A (r^φ N)^−α + B D^−β. Here, N is the number of parameters of all"
        " distinct blocks together, and r is the number of layers that use each block. So a block that r layers use is"
        f" worth as much as r^φ blocks that are used by one layer each. The law was fitted to {found.points} losses of"
        " unshared training and of arms shared throughout; each of these losses is a mean over the seeds. The root mean"
        f" square error of the fit is {found.residual:.4f} nats. The fit gives φ = {law.phi:.2f}{edge} ({ends}). The"
        " literature has"
        f" φ = {PUBLISHED}; {_published(found)}. The other constants are E = {law.irreducible:.3f},"
        f" A = {law.capacity:.3f} with N in units of 100,000 parameters, α = {law.alpha:.3f}, B = {law.data:.3f} with D"
        f" in units of 1,000,000 tokens, and β = {law.beta:.3f}."
    )
    own = next((one for one in leading(comparisons(trials)) if one.study == "dense"), None)
    if own is None:
        return text
    tokens, layers = max(curve.full for curve in own.trials[0].unshared.values()), LAYERS["dense"]
    rows = []
    for ratio in _SHOWN_RATIOS:
        measured = moments(own.trials, ratio)
        best = max(measured, key=lambda moment: measured[moment])
        by_law = best_moment(law, own.parameters, layers, tokens, ratio)
        shown = joined(f"{percent(moment)}: {speed:.2f}" for moment, speed in sorted(measured.items()))
        predicted = joined(
            f"{percent(moment)}: {speed_up_at(law, moment, own.parameters, layers, tokens, ratio):.2f}"
            for moment in sorted(measured)
        )
        rows.append([str(ratio), percent(by_law), percent(best), predicted, shown])
    head = [
        "cost ratio",
        "best delink by the law",
        "best delink measured",
        "speed-up in seconds by the law",
        "speed-up measured",
    ]
    tried = joined(percent(moment) for moment in sorted(moments(own.trials, 1)) if moment)
    note = (
        f"The table below is for models of {own.parameters:,} parameters whose layers share one block before the"
        " delink. A percentage says after which share of the tokens the model is delinked; 0 % means unshared training."
        " The best delink is the delink with the highest speed-up in seconds. The speed-up by the law was computed for"
        ' a delink at each whole percentage from 0 to 99 %. So a best delink at 99 % means "as late as possible". The'
        f" measured speed-ups come from trials with delinks at {tried}: the numbers of tokens are measured, and the"
        " seconds are computed from these numbers."
    )
    return f"{text}\n\n{note}\n\n{table(head, rows)}"


def _published(found: Fit) -> str:
    if found.low is None or found.high is None:
        return "it cannot be said whether the two values differ"
    return (
        "the interval of the fit contains this value"
        if found.low <= PUBLISHED <= found.high
        else "the interval of the fit does not contain this value"
    )


def trends(found: dict[Study, dict[str, Trend | str]]) -> str:
    rows = []
    for study, arms_of_study in found.items():
        for name, trend in arms_of_study.items():
            if isinstance(trend, str):
                rows.append([study, name, "–", trend])
            else:
                sizes = "; ".join(f"{sample.parameters:,}: {sample.mean:+.4f}" for sample in trend.samples)
                rows.append([study, name, sizes, number(trend.slope, 4, sign=True)])
    head = ["study", "arm", "parameters: mean difference, nats", "change for each doubling of the parameters"]
    return table(head, rows) if rows else "No arm is trained at two sizes yet."


def marks(found: Sequence[Mark]) -> str:
    rows = [[mark.study, mark.name, f"{mark.ratio:.2f}", mark.origin, mark.source] for mark in found]
    return table(["panel", "mark", "cost ratio", "origin", "source"], rows)


def not_trained(results: Sequence[Result], scale: Scale = REGISTERED) -> str:
    """Return what the plan asks for and the results lack."""
    have = {(r.study, r.role, r.width, r.arm, r.seed, r.rate, r.budget) for r in results}
    missing: dict[tuple[str, str, str], list[str]] = {}
    for one in planned(results, scale):
        run = one.run
        key = (run.study, one.role, run.width, run.arm.name, run.seed, run.rate)
        lacks = [budget for budget in one.budgets if (*key, budget * run.fraction) not in have]
        if lacks:
            name = f"rate {run.rate:g}, budget {percent(run.fraction)}" if one.role == "tuning" else f"seed {run.seed}"
            part = "" if len(lacks) == len(one.budgets) else f" at {joined(map(percent, lacks))}"
            missing.setdefault((run.study, str(run.width), run.arm.name), []).append(f"{name}{part}")
    for study, known in scale.arms.items():
        for arm in known:
            if rate_of(study, arm.tuned_as, results, scale) is None:
                missing.setdefault((study, "all", arm.name), []).append("its peak rate is not chosen yet")
    if not missing:
        return "Everything that the plan asks for is trained."
    rows = [[*key, joined(what)] for key, what in missing.items()]
    head = ["study", "width", "arm", "not trained"]
    return f"The plan also has the following trainings, which have no result yet:\n\n{table(head, rows)}"
