"""Compare step times predicted by `pseudoreal plan` with measured ones: `python -m benchmarks.predictions`.

The machine is measured first, as by `pseudoreal measure-hardware`; nothing is fitted to the measured steps.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.estimate.time.predict import predict
from pseudoreal_trainer.measure.machine import measure_machine
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import units_of
from pydantic import BaseModel, TypeAdapter
from torch.multiprocessing.spawn import spawn

from benchmarks import machine, pages
from benchmarks.claims import Claim
from benchmarks.environment import ENVIRONMENT
from benchmarks.quiet import quiet_machine
from benchmarks.results import RESULTS
from benchmarks.stacks.ours import make_engine, train_step
from benchmarks.work import Work, noisy_sequences

PREDICTIONS = RESULTS / "predictions.json"
BAR = 0.2
_WARM_UP, _TIMED = 2, 7


class Prediction(BaseModel, frozen=True):
    label: str
    predicted: float
    """Predicted seconds of a step."""
    measured: float
    """Median measured seconds of a step."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


Predictions = TypeAdapter(list[Prediction])


@dataclass(frozen=True)
class Configuration:
    label: str
    layout: Layout
    hidden: int = 128
    sequences: int = 4
    """Sequences per micro-batch over all data ranks."""

    @property
    def model(self) -> Model:
        heads, ffn = self.hidden // 32, FeedForward(size=4 * self.hidden)
        return Model(
            layers=self.layout.layers,
            hidden_size=self.hidden,
            attention=Attention(heads=heads),
            sequence_length=128,
            feed_forward=ffn,
        )

    def work(self) -> Work:
        batches = noisy_sequences(_WARM_UP + _TIMED, self.sequences * self.layout.micro_batches, 129, seed=7)
        return Work(self.model, 7, batches, self.layout.micro_batches, self.layout.recompute)


def configurations(ranks: int) -> list[Configuration]:
    one = Layout(tuple(range(6)), pipeline=1, data=1, micro_batches=4, clipping="None")
    if ranks == 1:
        return [
            Configuration("one rank, device", one),
            Configuration("one rank, host", replace(one, homes=("Host",) * 8)),
            Configuration("one rank, disk", replace(one, homes=("Disk",) * 8)),
            Configuration("one rank, activations kept", replace(one, keep="All")),
            Configuration("one rank, hidden 256", one, hidden=256),
            Configuration("one rank, 12 layers, n = 2", replace(one, layer_blocks=tuple(range(12)), micro_batches=2)),
            Configuration("one rank, global clipping", replace(one, homes=("Host",) * 8, clipping="Global")),
        ]
    data, pipeline = replace(one, data=2, sharding="Full"), replace(one, pipeline=2)
    return [
        Configuration("2 data ranks, full sharding", data),
        Configuration("2 data ranks, full sharding, n = 16", replace(data, micro_batches=16)),
        Configuration("2 data ranks, full sharding, host", replace(data, homes=("Host",) * 8)),
        Configuration("2 data ranks, full sharding, hidden 256", data, hidden=256),
        Configuration("2 data ranks, optimizer sharding", replace(data, sharding="Optimizer")),
        Configuration("2 data ranks, no sharding", replace(data, sharding="None")),
        Configuration("2 pipeline ranks, layered", pipeline),
        Configuration("2 pipeline ranks, gpipe", replace(pipeline, order="GPipe")),
        Configuration("2 pipeline ranks, 1f1b, kept", replace(pipeline, order="1F1B", keep="All")),
        Configuration(
            "2 pipeline ranks, layered, host, n = 8", replace(pipeline, homes=("Host",) * 8, micro_batches=8)
        ),
    ]


def main() -> None:
    os.environ |= ENVIRONMENT
    with quiet_machine():
        with progress.step("measuring the machine"):
            profile = measure_machine(lambda _: None)
        found = [prediction for ranks in (1, 2) for prediction in _with(ranks, profile)]
    PREDICTIONS.parent.mkdir(exist_ok=True)
    PREDICTIONS.write_bytes(Predictions.dump_json(found, indent=1))
    machine.stamp(PREDICTIONS)


def _with(ranks: int, profile: HardwareProfile) -> Iterator[Prediction]:
    with progress.step(f"steps on {ranks} rank{'s' if ranks > 1 else ''}"), TemporaryDirectory() as folder:
        spawn(_measure, (ranks, Path(folder)), nprocs=ranks)
        measured = TypeAdapter(list[float]).validate_json(Path(folder, "seconds.json").read_bytes())
    for configuration, seconds in zip(configurations(ranks), measured, strict=True):
        found = Prediction(label=configuration.label, predicted=_predicted(configuration, profile), measured=seconds)
        progress.note(
            f"    {found.label}: {1000 * found.predicted:.0f} ms predicted, {1000 * seconds:.0f} measured"
            f" ({found.error:+.0%})"
        )
        yield found


def _predicted(configuration: Configuration, profile: HardwareProfile) -> float:
    model, layout = configuration.model, configuration.layout
    sizes = Sizes(model, units_of(model, Sharing(blocks=layout.layers)), 4, 4, configuration.sequences)
    return predict(layout, sizes, profile, "float32").timeline.seconds


def _measure(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    meeting: Any = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": world}
    dist.init_process_group("gloo", **meeting)
    ranks = Ranks(rank, world, torch.device("cpu"))
    seconds = [_median_step(configuration, ranks, folder) for configuration in configurations(world)]
    if ranks.is_first:
        Path(folder, "seconds.json").write_bytes(TypeAdapter(list[float]).dump_json(seconds))
    dist.destroy_process_group()


def _median_step(configuration: Configuration, ranks: Ranks, folder: Path) -> float:
    work = configuration.work()
    engine = make_engine(work, ranks, configuration.layout, folder)
    ends = [time.perf_counter()]
    for step in range(len(work.batches)):
        train_step(engine, work, step)
        ends.append(time.perf_counter())
    engine.close()
    return median([end - begin for begin, end in pairwise(ends)][_WARM_UP:])


def read() -> list[Prediction]:
    return Predictions.validate_json(PREDICTIONS.read_bytes())


def claim(found: Sequence[Prediction], stamp: machine.Stamp) -> Claim:
    near, worst = [p for p in found if abs(p.error) <= BAR], max(found, key=lambda p: abs(p.error))
    side = "above" if worst.error > 0 else "below"
    miss = (
        f"the worst prediction is {abs(worst.error):.0%} {side} the measured time (row *{worst.label}*); the aim is a"
        f" difference of at most {BAR:.0%}"
    )
    return Claim(
        subject="Predicted seconds of a step",
        page=pages.PREDICTIONS.name,
        against="",
        result=(
            f"{len(near)} of {len(found)} predictions of `pseudoreal plan` are within {BAR:.0%} of the measured time",
        ),
        loses=(),
        misses=(miss,) if len(near) < len(found) else (),
        measured=f"{stamp.date}, at commit {stamp.commit}, on {machine.hardware()}",
        release=stamp.release,
    )


def section() -> str:
    """Return the section as Markdown, from the newest results."""
    found = read()
    rows = "\n".join(
        f"| {p.label} | {1000 * p.predicted:.0f} | {1000 * p.measured:.0f} | {p.error:+.0%} |" for p in found
    )
    near = sum(abs(p.error) <= BAR for p in found)
    return f"""## Predicted step times

`pseudoreal plan --hardware` predicts the time of a step from a hardware profile, a file with the measured speeds of a
machine. The benchmark first measured the profile of this machine, as `pseudoreal measure-hardware` does, and then timed
the steps. A measured time is the median of {_TIMED} steps. *error* is the predicted time minus the measured time, as a
share of the measured time. {near} of {len(found)} predicted times are within {BAR:.0%} of the measured time.

Unless the name of a row says otherwise, a row has the following settings: the model has 6 layers of hidden size 128;
blocks are recomputed in the backward pass; a step has n = 4 micro-batches; all ranks together compute 4 sequences of
128 bytes in a micro-batch; gradients are not clipped; the home of the state is the device. The name of a row has the
number of ranks, and each setting of the row that differs from the settings above. *device*, *host* and *disk* name the
home of the state; *layered*, *gpipe* and *1f1b* name the order of the passes; *kept* means that activations are kept.
In the row *one rank, global clipping*, gradients are clipped with `clipping.mode: Global`, and the home of the state is
the host.

| configuration | predicted, ms | measured, ms | error |
| --- | ---: | ---: | ---: |
{rows}"""


if __name__ == "__main__":
    main()
