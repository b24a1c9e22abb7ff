"""The first half page of docs/method.md: answers by the rules of the plan, sentence by sentence from the data. Pure."""

from collections.abc import Iterator, Sequence

from benchmarks.method.analysis import Comparison, Kind, Trial
from benchmarks.method.tables import joined, named, number, spans, table

_WORDS = """\
The *speed-up per token* is computed like the speed-up in seconds, but with numbers of tokens in place of seconds. Both
speed-ups are computed for each seed. The tables have the mean of each speed-up over the seeds, with the 95 % interval
of this mean in brackets.

The sign † marks an arm that ends with a higher loss than unshared training, on average over the seeds. For each seed,
the speed-up compares the seconds or tokens that the arm and unshared training need to reach one loss. If the arm ends
with a higher loss than unshared training, this loss is the final loss of the arm; otherwise, this loss is the final
loss of unshared training. So a speed-up with † does not say when, or whether, the arm reaches the final loss of
unshared training.

The *state* of the layers is their weights and the moments of the optimizer. If the state is not kept on the device, a
step moves the bytes of the state through the device while the step computes. So the *cost* of a step is the time in
which the step computes, or the time in which the bytes of the state are moved, whichever is longer. The *cost ratio* is
the cost of a real step divided by the cost of a pseudo step that does not wait for bytes. If a real step does not wait
for bytes either, the cost ratio is 1. If a real step waits for bytes, the cost ratio is above 1.

For each seed, an arm is compared with the unshared training that has the same seed. The *verdict* at a cost ratio
compares the interval of the arm's speed-up in seconds with 1, which is the speed-up of unshared training, and with the
mean speed-ups of the controls. The verdict is "yes" if the interval of the speed-up in seconds lies above 1, above the
mean speed-up of each arm shared throughout, and above the mean speed-up of each grown arm. The verdict is "no" if the
interval of the speed-up in seconds lies below 1 or below the mean speed-up of a control. Otherwise, the verdict is
"open". An arm that is itself a control is compared with 1 and with all other controls.

The *verdict per token* compares the interval of the speed-up per token with 1 alone. An open verdict per token is
called "level" if the final losses of the arm and of unshared training differ by less than 0.01 nats on average over the
seeds. In the following tables, the *loss difference* is the final loss of the arm minus the final loss of unshared
training, as the mean over the seeds. The last two columns of each table have the cost ratios at which the verdict on
the speed-up in seconds is "yes" or "no"."""
_NONE = "**Open: no arm and unshared training are trained with a seed in common yet.**"
_RATIOS = (1, 4)
"""Cost ratios of the first sentences: where nothing waits for bytes, and where experts of M6-10T do (`marks`)."""
_SPOKEN: tuple[Kind, ...] = ("delinked", "grown", "shared throughout")
_ARMS = """\
In *pseudo-to-real training*, layers share weights at first, and own their weights later ([Concepts](concepts.md)). The
trials on this page show whether pseudo-to-real training is faster than other ways to train a model. The trials form two
studies: the study *dense* trains models without experts, and the study *experts* trains models with experts. An *arm*
is a way to train a model. The trials compare these arms:

- *Unshared training*: each layer has its own weights from the first step to the last.
- *Delinked* arms: at first, layers share weights (whole blocks, or only the experts). Later, a *delink* gives the
  layers their own copies of the shared weights.
- *Grown* arms: at first, the model has fewer layers than the models of the other arms. Later, a *growth* adds the
  missing layers.
- *Upcycled* arms: at first, each layer has fewer experts than the layers of the other arms. Later, a growth adds the
  missing experts.
- Arms *shared throughout*: layers share weights from the first step to the last.
- The arm *small model* trains a model with a smaller hidden size than the models of all other arms.

A delinked arm pays if it is faster than unshared training and also faster than the *controls*. The controls are the
grown arms, the arms shared throughout, and the small model. The *speed-up in seconds* of an arm is a ratio: the seconds
of the whole unshared training, divided by the seconds after which the arm reaches the final loss of unshared training.
If the speed-up in seconds is above 1, the arm is faster than unshared training. The speed-up in seconds depends on the
machine, because on some machines a step waits while weights are moved between memories. So the tables compare arms at
several *cost ratios*. In a *real step* layers share nothing, and in a *pseudo step* layers share weights. The cost
ratio of a machine is the time of a real step, divided by the time of a pseudo step. The exact definition of the cost
ratio is below the first table. The answers are:"""
_FASTEST = """\
The following table has the speed-up in seconds of the fastest delinked arm, of the fastest grown arm, and of the
fastest arm shared throughout, at two cost ratios. In the name of an arm, a percentage says after which share of the
tokens the delink or the growth takes place. *4 blocks* in a name means that the layers share 4 blocks: until the delink
if the arm has a delink, and otherwise to the end. If the name of an arm that shares weights has no number of blocks,
all layers share one block, or one set of experts. The arm *1, 4, 12 blocks* has two delinks: to 4 blocks at 10 % of the
tokens, and to 12 blocks at 30 % of the tokens. The sign † is explained below the table."""
_KINDS = ("study", "cost ratio", *_SPOKEN)
_HEAD = (
    *("arm", "seeds", "speed-up per token", "verdict per token", "loss difference, nats"),
    *("in seconds, yes at ratios", "no at ratios"),
)


def answers(leading: Sequence[Comparison]) -> Iterator[str]:
    """Yield the paragraphs. `leading`: one comparison of each study."""
    yield _ARMS
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
        return f"yes. Faster than unshared training, grown arms and arms shared throughout: {joined(winners)}"
    if not found:
        return "open. No delinked arm and unshared training have a seed in common yet"
    pending = [(trial.arm.name, spans(one, trial, "open")) for trial in one.of_kind("delinked")]
    undecided = [f"*{name}* at cost ratios {where}" for name, where in pending if where]
    if undecided:
        return (
            "no delinked arm is shown to be faster than unshared training and all controls, at any cost ratio from 1 to"
            f" 20. The verdict is open for {joined(undecided)}"
        )
    return "no. At each cost ratio from 1 to 20, each delinked arm is slower than unshared training or than a control"


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
        f"**How sure are the answers?** The [plan](method-plan.md) has models of {planned} sizes, but each answer comes"
        f" from models of one size, with at most {max(one.parameters for one in leading):,} parameters. All models"
        " train on the same text, and each arm is trained with"
        f" {' to '.join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))} seeds. Seconds are computed from"
        f" operations and bytes, not measured. The verdicts on {arms} arms come from 95 % intervals, without a"
        " correction for multiple comparisons. So about one verdict in twenty may be wrong by chance."
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
