"""Pictures of the report, as SVG."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tests.benchmarks.cases import MICRO_BATCHES
from tests.benchmarks.summary import DEVICE, DISK, HOST, Timings

_LOOKS: Mapping[str, tuple[str, str]] = {
    DEVICE: ("tab:blue", "-"),
    HOST: ("tab:blue", "--"),
    DISK: ("tab:blue", ":"),
    "fully_shard": ("tab:orange", "-"),
    "fully_shard + offload": ("tab:orange", "--"),
    "DeepSpeed ZeRO-3": ("tab:green", "-"),
    "DeepSpeed ZeRO-3 + offload": ("tab:green", "--"),
}


def step_times(found: Timings, path: Path) -> None:
    """Milliseconds against micro-batches, a line for each stack; one panel with recompute and one without."""
    # The same numbers give the same file.
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
        times = {case.micro_batches: timing.milliseconds for (name, case), timing in found.items() if name == stack}
        axes.plot(list(times), list(times.values()), color=colour, linestyle=line, marker="o", label=stack)
    axes.set_xscale("log", base=2)
    axes.set_xticks(MICRO_BATCHES, [str(count) for count in MICRO_BATCHES])
    axes.set(xlabel="micro-batches", ylim=(0, None))
    axes.grid(alpha=0.3)
