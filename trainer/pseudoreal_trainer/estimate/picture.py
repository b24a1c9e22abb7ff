"""Timelines as an SVG: time on the x axis, one wide lane per pipeline rank for its passes, and thin lanes below for
concurrent copies, collectives and updates.

Written by hand: the picture consists only of boxes and text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10
from operator import itemgetter
from xml.sax.saxutils import escape

from pseudoreal_trainer.estimate.time.simulation import Span, Task
from pseudoreal_trainer.estimate.time.timeline import (
    COLLECTIVE,
    COMPUTE,
    COPY_IN,
    COPY_OUT,
    DISK,
    EXCHANGE,
    SIDE,
    Timeline,
)
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Forward,
    Pass,
    Read,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Stash,
    SumChoices,
    Unstash,
    Update,
)

_WIDTH, _LEFT, _TOP = 1240, 110, 44
_COMPUTE_HEIGHT, _LANE_HEIGHT, _RANK_GAP, _PANEL_GAP = 22, 10, 10, 46
_LEAST_WIDTH = 0.7
"""Least width of a box in pixels; narrower boxes are widened to it."""
_STYLE = (
    "text{font:11px sans-serif;fill:#222} .n{font-size:9px;text-anchor:middle} .r{text-anchor:end} .s{font-size:8px}"
)
_CHARACTER = 5.6
"""Width of a character inside a box, in pixels."""

_COLOURS: dict[type, tuple[str, str]] = {
    Forward: ("#9ecae1", "#6baed6"),
    Backward: ("#fdd0a2", "#fdae6b"),
    Fetch: ("#74c476", "#74c476"),
    Reduce: ("#9e9ac8", "#9e9ac8"),
    Update: ("#e377c2", "#e377c2"),
    Send: ("#969696", "#969696"),
}
"""Two colours per kind. Passes alternate between them from layer to layer, so that neighbouring layers differ."""
_SHOWN_AS: dict[type, type] = {
    **{Read: Fetch, Unstash: Fetch, Stash: Reduce, SumChoices: Reduce, Agree: Reduce},
    **{Count: Send, Exchange: Send},
    **{Route: Forward, ExpertForward: Forward, Recompute: Backward, ExpertBackward: Backward},
}
_LEGEND: dict[type, str] = {
    Forward: "forward",
    Backward: "backward",
    Fetch: "fetch, read",
    Reduce: "reduce, agree",
    Update: "update",
    Send: "message",
}
_SUBLANES = {
    COPY_IN: "in",
    COPY_OUT: "out",
    DISK: "disk",
    COLLECTIVE: "collective",
    EXCHANGE: "experts",
    "message": "messages",
    SIDE: "update",
}


@dataclass(frozen=True)
class Panel:
    title: str
    timeline: Timeline
    unit: str
    """Unit of time on the axis."""


def picture(panels: Sequence[Panel]) -> str:
    """Return the SVG with all panels, one below the other."""
    parts: list[str] = [*_legend()]
    y = _TOP
    for panel in panels:
        drawing = _Drawing(panel, y)
        parts += drawing.parts()
        y = drawing.bottom + _PANEL_GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]
    )


def _legend() -> Iterator[str]:
    for place, (kind, words) in enumerate(_LEGEND.items()):
        x = _LEFT + 110 * place
        yield f'<rect x="{x}" y="8" width="14" height="12" fill="{_COLOURS[kind][1]}"/>'
        yield f'<text x="{x + 19}" y="18">{words}</text>'


class _Drawing:
    def __init__(self, panel: Panel, top: int) -> None:
        self._panel, self._top = panel, top
        self._end = max([panel.timeline.seconds, *(span.end for _, span in self._boxes())])
        self._scale = (_WIDTH - _LEFT - 14) / (self._end or 1.0)
        self._lane_y = self._placed_lanes()
        self._turns = self._counted_positions()

    def parts(self) -> Iterator[str]:
        yield f'<text x="{_LEFT}" y="{self._top}" font-weight="bold">{escape(self._panel.title)}</text>'
        yield from self._axis()
        for (rank, lane), y in self._lane_y.items():
            label = f"rank {rank}" if lane == COMPUTE else _SUBLANES[lane]
            kind = "r" if lane == COMPUTE else "r s"
            yield f'<text class="{kind}" x="{_LEFT - 6}" y="{y + self._height(lane) / 2 + 3.5}">{label}</text>'
        for task, span in self._boxes():
            yield from self._box(task, span)

    def _boxes(self) -> Iterator[tuple[Task, Span]]:
        for task, span in zip(self._panel.timeline.tasks, self._panel.timeline.spans, strict=True):
            if task.record is not None and span.end > span.begin and span.end > 0:
                yield task, Span(max(span.begin, 0.0), span.end)

    def _placed_lanes(self) -> dict[tuple[int, str], float]:
        used = {(task.lane[0], _lane(task)) for task, _ in self._boxes()}
        y = float(self._top + 10)
        placed: dict[tuple[int, str], float] = {}
        for rank in range(1 + max((rank for rank, _ in used), default=-1)):
            for lane in (COMPUTE, *_SUBLANES):
                if (rank, lane) in used or lane == COMPUTE:
                    placed[rank, lane] = y
                    y += self._height(lane) + 1
            y += _RANK_GAP
        self.bottom = round(y) + 14
        return placed

    def _height(self, lane: str) -> int:
        return _COMPUTE_HEIGHT if lane == COMPUTE else _LANE_HEIGHT

    def _axis(self) -> Iterator[str]:
        step = _round_step(self._end / 10)
        for tick in range(int(self._end / step) + 1 if step else 0):
            x = _LEFT + tick * step * self._scale
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self._top + 8}" y2="{self.bottom - 12}" stroke="#e5e5e5"/>'
            yield f'<text class="n" x="{x:.1f}" y="{self.bottom}">{tick * step:g}</text>'
        x = _LEFT + self._panel.timeline.seconds * self._scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self._top + 8}" y2="{self.bottom - 12}" stroke="#d62728"/>'
        yield f'<text x="{_LEFT}" y="{self.bottom + 14}">{escape(self._panel.unit)}; red: end of the step</text>'

    def _box(self, task: Task, span: Span) -> Iterator[str]:
        record = task.record
        assert record is not None, "only tasks with a record are drawn"
        lane, width = _lane(task), max((span.end - span.begin) * self._scale, _LEAST_WIDTH)
        x, y, height = _LEFT + span.begin * self._scale, self._lane_y[task.lane[0], lane], self._height(lane)
        stroke = ' stroke="white" stroke-width="0.6"' if width > 2 else ""
        colour = self._colour(task.lane[0], record)
        words = f"{_words(record)}: {span.begin:.4g} to {span.end:.4g}"
        yield (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="{colour}"{stroke}>'
            f"<title>{escape(words)}</title></rect>"
        )
        if isinstance(record, Pass) and width >= _CHARACTER * len(str(record.micro_batch)) + 2:
            yield f'<text class="n" x="{x + width / 2:.2f}" y="{y + height / 2 + 3:.1f}">{record.micro_batch}</text>'

    def _colour(self, rank: int, record: Record) -> str:
        colours = _COLOURS[_SHOWN_AS.get(type(record), type(record))]
        return colours[self._turns[rank, record.position] % 2 if isinstance(record, Pass) else 0]

    def _counted_positions(self) -> dict[tuple[int, int], int]:
        """Return (rank, position) -> index of the position among the positions of its rank."""
        places = {(t.lane[0], t.record.position) for t, _ in self._boxes() if isinstance(t.record, Pass)}
        return {place: index for _, own in groupby(sorted(places), itemgetter(0)) for index, place in enumerate(own)}


def _lane(task: Task) -> str:
    return "message" if task.lane[1].startswith("message") else task.lane[1]


def _words(record: Record) -> str:
    names = (name for name in record.__slots__ if name not in ("flow", "peer"))
    return f"{type(record).__name__} {', '.join(f'{name} {getattr(record, name)}' for name in names)}".strip()


def _round_step(least: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    if least <= 0:
        return 0.0
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
