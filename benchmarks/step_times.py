"""The section of docs/benchmarks/steps.md on step times: tables, wins and losses, plots; and its claim."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.plan.units import units_of

from benchmarks import pages, plot
from benchmarks.agreement import TOLERANCE
from benchmarks.cases import MODELS, RANKS, BenchmarkModel, Case
from benchmarks.claims import Claim
from benchmarks.results import Results
from benchmarks.summary import MOST_SPREAD, Comparison, Timing, Timings, comparisons, timings

_METHOD = f"""## Step times beside torch and DeepSpeed

The tables show the time of one training step in float32 on {RANKS} ranks. Each rank has one thread, and the ranks
communicate by gloo over loopback. The compared programs are called *stacks*. In all rows except *not sharded* and
*DistributedDataParallel*, the stack of the row shards weights, gradients and optimizer state over the ranks. All stacks
start with the same weights, and train on the same batches with AdamW, without clipping. The relative difference between
the losses of two stacks in the same step must be at most {TOLERANCE:g}; otherwise the benchmark fails. n is the number
of micro-batches in a step.

In each round, the stacks run one after the other, each in fresh processes. A cell shows the median over the timed steps
of all rounds, and the quartiles in square brackets. If the distance between the quartiles is more than
{MOST_SPREAD:.0%} of the median, other programs disturbed the measurement. The cell of such a disturbed measurement
shows "not quiet" and the distance between the quartiles as a share of the median, and no comparison uses this cell.

- **pseudoreal**: this project's engine. The name of a row says whether the state of the units is on the device, on the
  host, or on disk.
- **fully_shard**: FSDP2, a part of torch. The benchmark applies fully_shard to each block and to the whole model. The
  stack reduces gradients over the ranks once in a step, with the last micro-batch. *Weights kept* is
  `reshard_after_forward=False`: each rank keeps the weights that it gathered in the forward pass until the backward
  pass. With *weights kept*, a rank needs more memory than without, but does not gather the weights a second time for
  the backward pass. *Offload* means `CPUOffloadPolicy`, which keeps the sharded weights, gradients and optimizer state
  in the memory of the host.
- **DistributedDataParallel**: a part of torch that shards neither weights nor gradients nor optimizer state. So
  *DistributedDataParallel* is compared with the row *not sharded*, which is pseudoreal with `stateSharding: None`.
- **DeepSpeed ZeRO-3**: DeepSpeed with its own AdamW and its default settings, except that clipping is off. With
  *offload*, parameters and optimizer state are on the host.

A factor in round brackets is the time of the stack in this row, divided by the time of the row of pseudoreal with which
this stack is compared. If the factor is above 1, pseudoreal is faster. Stacks with offload are compared with the row
*pseudoreal, host*. All other stacks that shard the state are compared with the row *pseudoreal, device*. On a CPU,
device and host are the same memory. So the tables do not show how fast a stack copies data between a host and an
accelerator."""


def section(results: Results, images: Path) -> str:
    """Return the section as Markdown, and draw the plots into `images`."""
    found = timings(results.runs)
    ratios = comparisons(found)
    models = [_model(name, found, ratios, images) for name in MODELS if any(case.model == name for _, case in found)]
    return "\n\n".join([_METHOD, *models, _wins_and_losses(ratios), _noise(found), *_crashes(results)])


def claim(results: Results) -> Claim:
    ratios, machine = comparisons(timings(results.runs)), results.machine
    won = sorted(ratio.ratio for ratio in ratios if ratio.is_won)
    lost: dict[str, list[float]] = {}
    for ratio in ratios:
        if not ratio.is_won:
            lost.setdefault(ratio.peer, []).append(ratio.ratio)
    faster = f"faster than torch and DeepSpeed in {len(won)} of {len(ratios)} comparisons of a training step"
    return Claim(
        subject="A training step",
        page=pages.STEPS.name,
        against=f"torch {machine.versions['torch']} (fully_shard, DistributedDataParallel),"
        f" deepspeed {machine.versions['deepspeed']} (ZeRO-3)",
        result=(f"pseudoreal is {faster}{_range(won)}",),
        loses=tuple(
            f"pseudoreal is slower than *{peer}* in {len(found)} of {sum(ratio.peer == peer for ratio in ratios)}"
            f" comparisons; the worst factor is {min(found):.2f}×"
            for peer, found in lost.items()
        ),
        measured=f"{machine.date}, at commit {machine.commit}, on {machine.hardware}",
        release=machine.release,
        in_readme=faster,
    )


def _model(name: str, found: Timings, ratios: Sequence[Comparison], images: Path) -> str:
    own = {key: timing for key, timing in found.items() if key[1].model == name}
    picture = images / f"step-times-{name}.svg"
    plot.step_times(own, picture)
    tables = (
        f"{heading}:\n\n{_table([key for key in own if key[1].recompute is recompute], found, ratios)}"
        for recompute, heading in (
            (True, "Blocks are recomputed in the backward pass"),
            (False, "Activations are kept"),
        )
        if any(case.recompute is recompute for _, case in own)
    )
    return "\n\n".join([_heading(name, MODELS[name]), *tables, pages.picture("Step times", picture.name)])


def _heading(name: str, model: BenchmarkModel) -> str:
    spec, effort = model.spec, model.effort
    more = [n for n in model.micro_batches if RANKS * n > model.sequences]
    millions = sum(unit.numel for unit in units_of(spec, Sharing(blocks=spec.layers))) / 1e6
    return (
        f"### {name.capitalize()} model\n\nThe model has {millions:.1f} M parameters: {spec.layers} layers of hidden"
        f" size {spec.hidden_size} and feed-forward size {spec.feed_forward.size}. A step has {model.sequences}"
        f" sequences of {spec.sequence_length:,} bytes."
        + "".join(
            f" With n = {n}, a step has {RANKS * n} sequences: one for each rank in each micro-batch." for n in more
        )
        + f" Each stack runs in {_counted(effort.rounds, 'round')}. In each round, the stack trains"
        f" {_counted(effort.warm_up, 'step')} for warm-up and then {effort.timed} timed steps."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _table(keys: Sequence[tuple[str, Case]], found: Timings, ratios: Sequence[Comparison]) -> str:
    """Return a table with a row per stack and a column per number of micro-batches."""
    stacks, cases = list(dict.fromkeys(stack for stack, _ in keys)), list(dict.fromkeys(case for _, case in keys))
    known = {(ratio.peer, ratio.case): ratio for ratio in ratios}
    cells = {
        (stack, case): _cell(found.get((stack, case)), known.get((stack, case)))
        for stack, case in product(stacks, cases)
    }
    rows = [[stack, *(cells[stack, case] for case in cases)] for stack in stacks]
    header = ["ms per step", *(f"n = {case.micro_batches}" for case in cases)]
    rule = ["---", *("---:" for _ in cases)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def _cell(timing: Timing | None, ratio: Comparison | None) -> str:
    if timing is None:
        return "–"
    if not timing.is_quiet:
        return f"not quiet ({timing.spread:.0%})"
    text = f"{timing.milliseconds:,.0f} [{timing.lower:,.0f}–{timing.upper:,.0f}]"
    return text + (f" ({ratio.ratio:.2f}×)" if ratio else "")


def _wins_and_losses(ratios: Sequence[Comparison]) -> str:
    lost = sorted((ratio for ratio in ratios if not ratio.is_won), key=lambda ratio: ratio.ratio)
    won = sorted(ratio.ratio for ratio in ratios if ratio.is_won)
    lines = ["### Wins and losses", ""]
    faster = f"pseudoreal is faster than the other stack in {len(won)} of {len(ratios)} comparisons{_range(won)}"
    lines.append(f"Each factor in the tables compares pseudoreal with another stack. {faster}.")
    names = "The list names the other stack, the model, and n, and says whether activations are kept or recomputed"
    lines += [f"\npseudoreal is slower than the other stack in {len(lost)} comparisons. {names}:\n"] if lost else []
    lines += [f"- {ratio.peer}, {ratio.case.label}: {ratio.ratio:.2f}×" for ratio in lost]
    return "\n".join(lines)


def _range(sorted_ratios: Sequence[float]) -> str:
    return f", with factors of {sorted_ratios[0]:.2f}× to {sorted_ratios[-1]:.2f}×" if sorted_ratios else ""


def _noise(found: Timings) -> str:
    spreads = sorted(timing.spread for timing in found.values())
    left_out = sum(not timing.is_quiet for timing in found.values())
    return (
        f"Noise: in half of the cells, the distance between the quartiles is at most {spreads[len(spreads) // 2]:.0%}"
        f" of the median. In the worst cell, the distance is {spreads[-1]:.0%} of the median. {left_out} of"
        f" {len(found)} cells are not quiet, and no comparison uses these cells."
    )


def _crashes(results: Results) -> list[str]:
    crashed = Counter(run.stack for run in results.runs if run.crashed_at_end)
    if not crashed:
        return []
    runs = " and ".join(f"{_counted(count, 'run')} of *{stack}*" for stack, count in crashed.items())
    return [
        f"In {runs}, processes crashed after their last step, while they shut down. The tables include the timed steps"
        " of these processes."
    ]
