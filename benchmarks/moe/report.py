"""The section of docs/benchmarks/mixtures.md on losses."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.moe import experiments as ex
from benchmarks.moe.lives import Life
from benchmarks.results import RESULTS

LIVES = RESULTS / "moe.jsonl"
TITLE = "## Losses at equal tokens"
_TEXT = f"""Models of 8 layers of hidden size 64 train on the King James Bible, in float32 on one thread of a CPU. Each
model trains for {ex.STEPS} steps; a step has {ex.SEQUENCES} sequences of {ex.LENGTH} bytes. The loss is the validation
loss over {ex.VALIDATION_SEQUENCES} sequences, in nats per byte. A loss in the tables is the mean over {len(ex.SEEDS)}
seeds; the brackets have the lowest and the highest loss among these seeds. *Dense* is a model without experts. With
*top k*, the router chooses the k experts of a token from all experts of the layer. With *k prototypes* (M6-T), the
experts of a layer are divided into k groups, and the router chooses one expert of each group. In all models, the
feed-forward matrices through which a token passes in one layer have the same total size. In models with experts, the
matrices of all experts of a layer together have eight times the size of the matrices through which a token passes in
this layer. The second table compares ways to share weights. *Shared experts* means that all layers use the same
experts; *shared blocks* means that all layers use the same block. *Then real* means that each layer has weights of its
own after the first {ex.PSEUDO_STEPS} steps. For the column *time of a step*, the benchmark takes the median time over
the steps of the last phase, and averages this median over the seeds. The column has the average of the row, divided by
the average of the first row of the table. Losses of models this small, trained on so few tokens, do not predict the
losses of large models."""


def read(path: Path = LIVES) -> list[Life]:
    return [Life.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def section(lives: Sequence[Life] | None = None) -> str:
    found = read() if lives is None else lives
    by_name = {
        experiment.name: [life for life in found if life.experiment == experiment.name] for experiment in ex.EXPERIMENTS
    }
    routings = _table("routing", ex.ROUTINGS, by_name)
    sharings = _table(
        f"2 prototypes; layers share for the first {ex.PSEUDO_STEPS} steps (then real), or to the end",
        ex.SHARINGS,
        by_name,
    )
    newest = max(found, key=lambda life: life.date)
    measured = f"These losses were measured on {newest.date}, at commit {newest.commit}."
    return "\n\n".join([TITLE, _TEXT, routings, sharings, measured])


def _table(title: str, experiments: Sequence[ex.Experiment], lives: dict[str, list[Life]]) -> str:
    first = lives[experiments[0].name]
    rows = [f"| {title} | loss | loss minus the first row's loss | time of a step |", "|---|---|---|---|"]
    for experiment in experiments:
        losses, base = _losses(lives[experiment.name]), _losses(first)
        ratio = _step(lives[experiment.name]) / _step(first)
        rows.append(
            f"| {experiment.name} | {mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) |"
            f" {mean(losses) - mean(base):+.3f} | {ratio:.2f}× |"
        )
    return "\n".join(rows)


def _losses(lives: Sequence[Life]) -> list[float]:
    return [life.final_loss for life in lives]


def _step(lives: Sequence[Life]) -> float:
    return mean(life.phases[-1].seconds_per_step for life in lives)
