"""The section of docs/benchmarks/mixtures.md on step times, and its claim."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks import pages
from benchmarks.claims import Claim
from benchmarks.moe import steps_plot
from benchmarks.moe.beside import cases
from benchmarks.moe.beside.agreement import TOLERANCES, furthest
from benchmarks.moe.beside.names import COUNTERPARTS, stacks_of
from benchmarks.moe.results import Beside, Product, Results, Run, Step, Taken, ratio
from benchmarks.moe.steps import grouped as products
from benchmarks.moe.steps import growth, routing
from benchmarks.pages import IMAGES, picture

TITLE = "## Step times"
PICTURE = "moe-steps.svg"
_TEXT = """Stacks and jobs take turns, so that compared figures were measured at about the
same time, and other programs slow down all of them alike. Quote ratios and no seconds. *Processor* is the time for
which threads of the process really ran: it excludes the time that other programs took, but not the effect of their
share of caches and memory."""


def section(results: Results, images: Path = IMAGES) -> str:
    """Return the section as Markdown, and draw the plot into `images`."""
    parts = [TITLE, _TEXT]
    if results.beside:
        parts += _beside(results.beside)
    if results.growth:
        steps_plot.growth(results.growth, images / PICTURE)
        parts += [*_growth(results.growth), picture("Steps against experts", PICTURE)]
    if results.routing:
        parts += _routing(results.routing)
    if results.grouped:
        parts += _grouped(results.grouped)
    return "\n\n".join([*parts, _measured(results)])


def claim(results: Results) -> Claim:
    """Return the claim on steps beside other stacks, from the medians of steps."""
    found, machine = results.beside, results.machine
    assert found is not None, "the part `beside` is measured"
    ratios: dict[str, list[float]] = {}
    for stack, case in dict.fromkeys((run.stack, run.case) for run in found.runs if run.stack in COUNTERPARTS):
        runs, ours = found.of(stack, case), found.of(COUNTERPARTS[stack], case)
        if not any(run.error for run in [*runs, *ours]):
            ratios.setdefault(stack, []).append(middle(runs) / middle(ours))
    lost = {stack: [ratio for ratio in of if ratio < 1] for stack, of in ratios.items()}
    return Claim(
        subject="A step with experts",
        page=pages.MIXTURES.name,
        against=", ".join(f"{name} {version}" for name, version in found.versions.items() if name != "torch"),
        result=tuple(f"{min(of):.2f}× to {max(of):.2f}× as fast as {stack}" for stack, of in ratios.items()),
        loses=tuple(
            f"{len(of)} of {len(ratios[stack])} comparisons with {stack}, at worst {min(of):.2f}×"
            for stack, of in lost.items()
            if of
        ),
        measured=f"{machine.date}, at {machine.commit}, {machine.hardware}",
        release=machine.release,
    )


def _measured(results: Results) -> str:
    machine = results.machine
    stamps = "; ".join(f"{name}: {stamp.date}, {stamp.commit}" for name, stamp in results.measured.items())
    return f"{machine.hardware}, torch {machine.versions['torch']}. Measured on: {stamps}."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


# Section: comparison with other stacks.


def _beside(found: Beside) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if name != "torch")
    apart = " and ".join(
        f"{furthest(found.runs, compute):.1e} in {compute} (at most {most:g}, or there would be no table)"
        for compute, most in TOLERANCES.items()
    )
    text = f"""### Beside DeepSpeed's and torchtitan's mixtures

{cases.LAYERS} layers of width {cases.HIDDEN} on {cases.RANKS} ranks (gloo over loopback, a thread each), each with half
of all experts; each token goes to {cases.PER_TOKEN} SwiGLU experts of size {cases.EXPERT_SIZE}, none of which is ever
full. A step has {cases.SEQUENCES} sequences of {cases.LENGTH} bytes. Attention and all other modules are this project's
in all stacks, with the same first weights, batches and AdamW; activations are kept. The losses of a step differ by
{apart}. n is the number of micro-batches; {cases.ROUNDS} rounds of {cases.TIMED} timed steps. In brackets: the time of
the stack divided by the time of ours with as much of the state sharded; above 1, ours is faster. {versions}.

torchtitan's experts compute in bfloat16, whatever the type of the other modules, so it is in one table only. Of its
trainer only the layer is used. In bfloat16 on a CPU, oneDNN creates a kernel for each number of rows that it meets for
the first time, which takes longer than the product itself. Ours and torchtitan give each expert its actual rows, and
their numbers are new again and again; DeepSpeed pads all experts of a layer to one number of rows."""
    return [text, *(_types(found, compute) for compute in TOLERANCES)]


def _types(found: Beside, compute: cases.Compute) -> str:
    own = [case for case in cases.CASES if case.compute == compute]
    header: list[str] = [compute]
    for case in own:
        header += [f"{case.label}: fastest, ms", "median, ms", "processor, ms"]
    rows = [[stack, *(cell for case in own for cell in _cells(found, stack, case))] for stack in stacks_of(own[0])]
    return table(header, rows)


def _cells(found: Beside, stack: str, case: cases.Case) -> list[str]:
    runs = found.of(stack, case)
    errors = [run.error for run in runs if run.error]
    if errors:
        return [f"`{errors[0]}`", "", ""]
    base = found.of(COUNTERPARTS.get(stack, stack), case)
    return [
        _compared(figure(runs), figure(base), is_peer=stack in COUNTERPARTS) for figure in (fastest, middle, processor)
    ]


def _compared(value: float, base: float, *, is_peer: bool) -> str:
    return f"{1000 * value:,.0f}" + (f" ({value / base:.2f}×)" if is_peer else "")


def _timed(runs: Sequence[Run]) -> list[Step]:
    return [step for run in runs for step in run.timed]


def fastest(runs: Sequence[Run]) -> float:
    return min(step.seconds for step in _timed(runs))


def middle(runs: Sequence[Run]) -> float:
    return median(step.seconds for step in _timed(runs))


def processor(runs: Sequence[Run]) -> float:
    return median(step.processor for step in _timed(runs))


# Section: number of experts.


def _growth(found: dict[str, list[Taken]]) -> list[str]:
    parameters = [f"{2 * growth.LAYERS * n * growth.HIDDEN * growth.EXPERT_SIZE / 1e6:,.0f} M" for n in growth.COUNTS]
    text = f"""### Steps against the number of experts

One rank, {growth.LAYERS} layers of width {growth.HIDDEN}; each token goes to {growth.PER_TOKEN} experts of size
{growth.EXPERT_SIZE}, whatever the number of experts, so the matrix products of a step are the same, except for the
router's. Float32, blocks recomputed, one micro-batch. Engines with all numbers of experts take turns in one process; a
turn is a step and the end of its updates, and a ratio is the median over {growth.TURNS} turns. The losses are the same
to the bit in all homes. On this machine device and host are the same memory.

*Passes* is the thread that computes forward and backward; *others* are the threads that reduce, update, copy, read and
write, at the same time if a second core is free. Both are processor seconds of a step; neither includes the disk's own
time."""
    header = ["", *(f"{count:,} experts" for count in growth.COUNTS)]
    rows = [["parameters of experts", *parameters]]
    for name, taken in found.items():
        rows += _curve(name, taken)
    return [text, table(header, rows), "\n".join(_verdict(name, taken) for name, taken in found.items()), _WHY]


def _curve(name: str, taken: Sequence[Taken]) -> list[list[str]]:
    first = taken[0]
    return [
        [f"**{name}**: time of a step", *(f"{ratio(each, first):.2f}×" for each in taken)],
        ["… passes, s", *(f"{each.passes:.2f} ({passes_ratio(each, first):.2f}×)" for each in taken)],
        ["… others, s", *(f"{each.others:.2f}" for each in taken)],
    ]


def passes_ratio(taken: Taken, base: Taken) -> float:
    return median(one.passes / other.passes for one, other in zip(taken.turns, base.turns, strict=True))


def flat_to(ratios: Sequence[float]) -> int:
    """Return the largest number of experts up to which every step time counts as flat."""
    beyond = next((index for index, each in enumerate(ratios) if each > growth.MOST), len(ratios))
    return growth.COUNTS[beyond - 1]


def _verdict(name: str, taken: Sequence[Taken]) -> str:
    whole, passes = ([figure(each, taken[0]) for each in taken] for figure in (ratio, passes_ratio))
    return (
        f"- {name}: flat within {growth.MOST - 1:.0%} to {flat_to(whole):,} experts by the time of a step, to"
        f" {flat_to(passes):,} by the passes alone."
    )


_WHY = """Where steps are not flat, the passes are the reason. The optimizer changes all experts in every step, so its
bytes grow with the experts and not with the tokens, but *others* show that this part is small here. Each expert is a
matrix product of its own: with 64 times as many experts, each product has 64 times fewer rows and the same fixed costs,
and gradients as large as all experts are written. In a profile of one layer with 8,192 tokens, before experts were
stacked, products took 0.33 s with 1,024 experts and 0.20 s with 16; the router's softmax and choice, which grow with
the experts, took 0.05 s. With more tokens in a micro-batch, all of these become a smaller part."""


# Section: routing.


def _routing(found: dict[str, list[Taken]]) -> list[str]:
    text = f"""### Prototypes beside top k

{routing.EXPERTS} experts in {routing.LAYERS} layers of width {routing.HIDDEN}; the k experts of a token have
{routing.ROWS:,} rows together. Prototypes choose one expert each, and an expert accepts {routing.CAPACITY} times its
even share of a sequence (M6-T); top k chooses k experts, and rejects no token. Float32, one rank. *Rows* are the rows
that experts compute for a token in a layer. Ratios: top k divided by prototypes; above 1, prototypes are faster."""
    header = ["k", "prototypes, rows", "passes, s", "top k, rows", "passes, s", "passes", "for each row", "step"]
    return [text, table(header, [_routed(int(k), *taken) for k, taken in found.items()])]


def _routed(k: int, prototypes: Taken, top_k: Taken) -> list[str]:
    both = (prototypes, top_k)
    figures = [cell for each in both for cell in (f"{rows(k, each):.2f}", f"{each.passes:.2f}")]
    passes = passes_ratio(top_k, prototypes)
    for_each_row = passes * rows(k, prototypes) / rows(k, top_k)
    return [str(k), *figures, f"{passes:.2f}×", f"{for_each_row:.2f}×", f"{ratio(top_k, prototypes):.2f}×"]


def rows(k: int, taken: Taken) -> float:
    """Return the rows per token and layer in the last step."""
    return k * (1 - taken.dropped)


# Section: grouped products.


def _grouped(found: Sequence[Product]) -> list[str]:
    text = f"""### One product after the other, or grouped

{products.ROWS:,} rows of {products.INPUTS}, each for one of the experts, times matrices of {products.OUTPUTS} by
{products.INPUTS}, forward and backward on one thread: milliseconds of its processor, medians of {products.TURNS}. The
grouped product is `torch.nn.functional.grouped_mm`; it gives the loop's numbers to the bit, otherwise there would be no
table. *New*: the loop when experts have numbers of rows for the first time. This project's engine uses the grouped
product if there is one and experts have no biases, and else the loop."""
    ways = (products.LOOP, products.GROUPED, products.NEW)
    keys = dict.fromkeys((each.dtype, each.experts) for each in found)
    body = []
    for dtype, experts in keys:
        own = {each.way: each for each in found if (each.dtype, each.experts) == (dtype, experts)}
        body.append([f"{dtype}, {experts} experts", *(_product(own[way], own[products.LOOP]) for way in ways)])
    return [text, table(["", "loop", "grouped", "new"], body)]


def _product(product: Product, loop: Product) -> str:
    if product.error:
        return f"`{product.error}`"
    taken, base = median(product.turns), median(loop.turns)
    return f"{1000 * taken:.1f}" + ("" if product is loop else f" ({taken / base:.2f}×)")
