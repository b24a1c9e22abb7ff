"""Draws docs/images/plan.svg from an estimated step: `python -m benchmarks.plan_picture TRACE SVG`.

TRACE is written by `pseudoreal plan JOB.yaml --trace TRACE`. One row per pipeline rank and resource.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

_COLOURS = {"Forward": "#6baed6", "Backward": "#fdae6b", "Fetch": "#74c476", "Reduce": "#9e9ac8", "Update": "#e377c2"}
_OTHER = "#969696"
_ORDER = ("compute", "copy in", "copy out", "disk", "collective", "exchange", "message", "reduction", "update")


def draw(trace: dict[str, Any], path: Path) -> None:
    # Equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 8})
    plt.switch_backend("svg")
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    rows: defaultdict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        rows[event["pid"], event["tid"]].append(event)
    names = sorted(rows, key=lambda row: (row[0], next(i for i, name in enumerate(_ORDER) if row[1].startswith(name))))
    figure, axes = plt.subplots(figsize=(12, 0.22 * len(names) + 1))
    for y, row in enumerate(names):
        spans = [(event["ts"] / 1000, event["dur"] / 1000) for event in rows[row]]
        colours = [_COLOURS.get(event["name"], _OTHER) for event in rows[row]]
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(names)), [f"rank {rank} {resource}" for rank, resource in names])
    axes.invert_yaxis()
    axes.set_xlabel("forward passes of a layer (milliseconds of the trace)")
    handles = [Patch(color=colour) for colour in (*_COLOURS.values(), _OTHER)]
    axes.legend(
        handles, [*map(str.lower, _COLOURS), "other"], ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1)
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
