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
_PARTS = {
    "beside": "other stacks",
    "growth": "numbers of experts",
    "routing": "prototypes beside top k",
    "grouped": "grouped products",
}
"""Part of the results -> its words in the section."""
_TEXT = """In each part of this section, the compared programs (*stacks*), models or kinds of routing take turns. So
other programs on the machine slowed all compared steps by about the same factor. Therefore quote the ratios, not the
seconds. *Processor* is processor time: the time during which threads of the process ran on a core. The time in which a
thread waits for a core is not part of the processor time. So other programs can lengthen the processor time only by
competing for the caches and the memory."""


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
        result=tuple(
            f"a step of pseudoreal is {min(of):.2f}× to {max(of):.2f}× as fast as a step of *{stack}*"
            for stack, of in ratios.items()
        ),
        loses=tuple(
            f"pseudoreal is slower than *{stack}* in {len(of)} of {len(ratios[stack])} comparisons; the worst factor"
            f" is {min(of):.2f}×"
            for stack, of in lost.items()
            if of
        ),
        measured=f"{machine.date}, at commit {machine.commit}, on {machine.hardware}",
        release=machine.release,
    )


def _measured(results: Results) -> str:
    machine = results.machine
    parts = [f"- {_PARTS[name]}: {stamp.date}, commit {stamp.commit}" for name, stamp in results.measured.items()]
    return (
        f"The step times were measured with torch {machine.versions['torch']}, on a machine with {machine.hardware}."
        " The list says when, and at which commit, each part of this section was measured:\n\n"
    ) + "\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


# Section: comparison with other stacks.


def _beside(found: Beside) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if name != "torch")
    apart = " and by at most ".join(f"{furthest(found.runs, compute):.1e} in {compute}" for compute in TOLERANCES)
    most = " or by more than ".join(f"{tolerance:g} in {compute}" for compute, tolerance in TOLERANCES.items())
    text = f"""### Beside DeepSpeed's and torchtitan's mixtures

The model has {cases.LAYERS} layers of hidden size {cases.HIDDEN} and runs on {cases.RANKS} ranks. Each rank has one
thread, and the ranks communicate by gloo over loopback. Each rank has half of the experts of each layer. Each token
goes to {cases.PER_TOKEN} SwiGLU experts of size {cases.EXPERT_SIZE}. An expert accepts all tokens that are routed to
it. A step has {cases.SEQUENCES} sequences of {cases.LENGTH} bytes. The models of the stacks differ only in their layers
of experts; attention and all other modules are pseudoreal's. All stacks start with the same weights, train on the same
batches with AdamW, and keep all activations for the backward pass. In each step, the losses of any two stacks differ by
at most {apart} (relative). The benchmark fails if these losses differ by more than {most}. n is the number of
micro-batches in a step. Each stack runs in {cases.ROUNDS} rounds of {cases.TIMED} timed steps. A factor in brackets is
the time of the stack in this row, divided by the time in the row of pseudoreal with which this stack is compared. If
the factor is above 1, pseudoreal is faster. DeepSpeed runs with ZeRO-2, which shards gradients and optimizer state, so
DeepSpeed is compared with the row *pseudoreal, gradients sharded*. torchtitan runs with fully_shard, which also shards
the weights, so torchtitan is compared with the row *pseudoreal, fully sharded*. Versions: {versions}.

torchtitan's experts always compute in bfloat16, so torchtitan is only in the table of bfloat16. The benchmark uses
torchtitan's layer of experts, but not torchtitan's trainer. In bfloat16 on a CPU, torch computes matrix products with
the library oneDNN, which compiles a kernel for each new number of rows of an input matrix. The compilation of a kernel
takes longer than the matrix product. In pseudoreal and torchtitan, the input matrix of an expert has one row for each
token that the expert gets, so new numbers of rows are frequent. DeepSpeed pads the input matrices of all experts of a
layer to the same number of rows, so new numbers of rows are less frequent."""
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
        f"{1000 * figure(runs):,.0f}" + (f" ({figure(runs) / figure(base):.2f}×)" if stack in COUNTERPARTS else "")
        for figure in (fastest, middle, processor)
    ]


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

One rank trains models that differ only in the number of experts of a layer. All these models have {growth.LAYERS}
layers of hidden size {growth.HIDDEN}. They train in float32, with one micro-batch in a step, and blocks are recomputed
in the backward pass. In all models, each token goes to {growth.PER_TOKEN} experts of size {growth.EXPERT_SIZE}. So the
matrix products take the same number of operations in all models, except for the router's product. One process has an
engine for each model, and the engines take turns. In its turn, an engine runs one step with all updates of this step.
For each turn, the time of a step of the model of the column is divided by the time of a step of the model with
{growth.COUNTS[0]} experts; the table shows the median of this ratio over {growth.TURNS} turns. Bold text in the first
column names the home of the state and the number of tokens in a step. A model has the same losses, bit for bit, with
all homes. On this machine, device and host are the same memory.

*Passes* is the processor time of the thread that computes the forward and backward passes. *Others* is the processor
time of all other threads of the process. The other threads reduce gradients, update weights, copy units, and read and
write the disk. If a second core is free, the other threads run at the same time as the passes. *Passes* and *others*
are seconds per step, without the time in which threads wait for the disk."""
    header = ["", *(f"{count:,} experts" for count in growth.COUNTS)]
    rows = [["parameters of experts", *parameters]]
    for name, taken in found.items():
        first = taken[0]
        rows += [
            [f"**{name}**: time of a step", *(f"{ratio(each, first):.2f}×" for each in taken)],
            ["… passes, s", *(f"{each.passes:.2f} ({passes_ratio(each, first):.2f}×)" for each in taken)],
            ["… others, s", *(f"{each.others:.2f}" for each in taken)],
        ]
    verdicts = "\n".join(_verdict(name, taken) for name, taken in found.items())
    return [text, table(header, rows), f"{_FLAT}\n\n{verdicts}", _WHY]


def passes_ratio(taken: Taken, base: Taken) -> float:
    return median(one.passes / other.passes for one, other in zip(taken.turns, base.turns, strict=True))


def flat_to(ratios: Sequence[float]) -> int:
    """Return the largest number of experts up to which every step time counts as flat."""
    beyond = next((index for index, each in enumerate(ratios) if each > growth.MOST), len(ratios))
    return growth.COUNTS[beyond - 1]


def _verdict(name: str, taken: Sequence[Taken]) -> str:
    whole, passes = ([figure(each, taken[0]) for each in taken] for figure in (ratio, passes_ratio))
    return f"- {name}: up to {flat_to(whole):,} experts; for the passes alone, up to {flat_to(passes):,} experts."


_FLAT = f"""\
For each home of the state and each number of tokens, the following list has two numbers of experts. Up to the first
number, a step takes at most {growth.MOST - 1:.0%} longer than with {growth.COUNTS[0]} experts. Up to the second number,
the passes alone take at most {growth.MOST - 1:.0%} longer than with {growth.COUNTS[0]} experts:"""
_WHY = """\
In the table, all steps with more experts than the first number of the list take more than 15% longer than the step with
16 experts. With the state on device or host, most of the additional time is time of the passes. With the state on disk,
the other threads and the disk itself add about as much time as the passes. The optimizer updates all experts in every
step, so the time of the updates grows with the number of experts, but not with the number of tokens. The passes compute
a separate matrix product for each expert. With 1,024 experts in place of 16, each of these products has one 64th of the
rows, but the same fixed costs. Each step also writes gradients for all experts. A profile (a list of the times of
operations) of one layer with 8,192 tokens was made before the weights of experts were stacked in one tensor. In this
profile, the products of all experts took 0.33 s with 1,024 experts, and 0.20 s with 16 experts. In the same profile,
the router's softmax and choice of experts together took 0.05 s; this time grows with the number of experts. With more
tokens in a micro-batch, the additional costs of many experts become a smaller part of a step."""


# Section: routing.


def _routing(found: dict[str, list[Taken]]) -> list[str]:
    text = f"""### Prototypes beside top k

The model has {routing.LAYERS} layers of hidden size {routing.HIDDEN} with {routing.EXPERTS} experts each, and trains on
one rank in float32. The feed-forward sizes of the k experts of a token add up to {routing.ROWS:,}. With prototypes, an
expert accepts at most {routing.CAPACITY} times the even share of the tokens of a sequence, and rejects the other
tokens. (The even share is the number of tokens of the sequence, divided by the number of experts of a group.) With top
k, no token is rejected. *Rows* is the mean number of rows that the experts of a layer compute for a token: one row for
each expert that accepts the token. A ratio is the time with top k divided by the time with prototypes. If a ratio is
above 1, prototypes are faster. For the column *… for each row*, the time of the passes is divided by the number in the
column *rows*, with top k and with prototypes; the column has the ratio of the two quotients."""
    header = ["k", "prototypes, rows", "passes, s", "top k, rows", "passes, s"]
    header += ["ratio of the passes", "… for each row", "ratio of the step"]
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

Each of {products.ROWS:,} rows of {products.INPUTS} elements belongs to one expert, and is multiplied by the matrix of
this expert, which has {products.OUTPUTS} by {products.INPUTS} elements. One thread computes the forward and the
backward pass of all these products. Figures are processor milliseconds, medians of {products.TURNS} turns; in brackets
is the figure divided by the figure in the column *loop*. *Loop* computes the products of the experts one after the
other. *Grouped* computes the products of all experts by one call of `torch.nn.functional.grouped_mm`. If this call
raises an error for a type of number, the table has the message of the error. The benchmark fails unless the results of
the loop and of the grouped product have the same bits. *Loop, new* is the first run of the loop after the numbers of
rows of the experts have changed. pseudoreal's engine uses the grouped product if three conditions hold: torch has a
grouped product for this type of number, the experts have no biases, and the number of bytes of each row of the matrices
is a multiple of 16. Otherwise, the engine uses the loop."""
    ways = (products.LOOP, products.GROUPED, products.NEW)
    keys = dict.fromkeys((each.dtype, each.experts) for each in found)
    body = []
    for dtype, experts in keys:
        own = {each.way: each for each in found if (each.dtype, each.experts) == (dtype, experts)}
        body.append([f"{dtype}, {experts} experts", *(_product(own[way], own[products.LOOP]) for way in ways)])
    return [text, table(["", "loop", "grouped", "loop, new"], body)]


def _product(product: Product, loop: Product) -> str:
    if product.error:
        return f"`{product.error}`"
    taken, base = median(product.turns), median(loop.turns)
    return f"{1000 * taken:.1f}" + ("" if product is loop else f" ({taken / base:.2f}×)")
