"""Plots of the report, as SVG."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.summary import DEVICE, DISK, HOST, WHOLE, Timings

_LOOKS: Mapping[str, tuple[str, str]] = {
    DEVICE: ("tab:blue", "-"),
    HOST: ("tab:blue", "--"),
    DISK: ("tab:blue", ":"),
    WHOLE: ("tab:cyan", "-"),
    "DistributedDataParallel": ("tab:red", "-"),
    "fully_shard": ("tab:orange", "-"),
    "fully_shard, weights kept": ("tab:orange", ":"),
    "fully_shard + offload": ("tab:orange", "--"),
    "DeepSpeed ZeRO-3": ("tab:green", "-"),
    "DeepSpeed ZeRO-3 + offload": ("tab:green", "--"),
}


def step_times(found: Timings, path: Path) -> None:
    """Draw milliseconds against micro-batches, a line per stack; one panel with recomputation and one without."""
    # Equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none"})
    plt.switch_backend("svg")
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, recompute in zip(panels, (True, False), strict=True):
        _panel(axes, {key: timing for key, timing in found.items() if key[1].recompute is recompute})
        axes.set_title("blocks recomputed" if recompute else "activations kept")
    panels[0].set_ylabel("ms per step")
    panels[1].legend(*panels[0].get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def _panel(axes: Axes, found: Timings) -> None:
    for stack, (colour, line) in _LOOKS.items():
        own = {case.micro_batches: timing for (name, case), timing in found.items() if name == stack}
        times = {count: timing.milliseconds for count, timing in own.items() if timing.is_quiet}
        axes.plot(list(times), list(times.values()), color=colour, linestyle=line, marker="o", label=stack)
    axes.set_xscale("log", base=2)
    counts = sorted({case.micro_batches for _, case in found})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="micro-batches", ylim=(0, None))
    axes.grid(alpha=0.3)
