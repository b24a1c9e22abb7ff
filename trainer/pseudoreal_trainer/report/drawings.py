"""Pictures of boxes, lines and words: the checkpoints' descent, the time line, the plan of a step. Pure.

A drawing has a size and elements in its own units. How they look is for the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pseudoreal_trainer.report.lineage import Checkpoint, Lineage
from pseudoreal_trainer.report.restarts import Run, utc
from pseudoreal_trainer.report.step_plan import KINDS, StepPicture, Stream
from pseudoreal_trainer.report.text import shown


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    style: str
    """Class of the page's style sheet."""
    hint: str
    """Text for the pointer."""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    style: str
    hint: str


@dataclass(frozen=True)
class Stroke:
    x1: float
    y1: float
    x2: float
    y2: float
    style: str


@dataclass(frozen=True)
class Word:
    x: float
    y: float
    text: str
    anchor: str = "start"
    """start, middle or end: what of the text stands at `x`."""


@dataclass(frozen=True)
class Drawing:
    title: str
    summary: str
    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    strokes: list[Stroke] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)


MOST_DOTS = 300
"""Most checkpoints, the newest, that are drawn."""
_MOST_RUNS = 60
"""Most runs, the newest, that are drawn."""
_LEFT, _ROW, _STEP, _SMALL_STEP = 150, 44, 26, 11
"""Width of the words at the left; height of a row; distance of a checkpoint from the one before, and of a removed one,
whose dot is smaller."""


def draw_lineage(lineage: Lineage) -> Drawing | None:
    """Return the descent of the checkpoints: a row for each phase, time to the right; None without checkpoints."""
    checkpoints = lineage.checkpoints[-MOST_DOTS:]
    if not checkpoints:
        return None
    phases = list(dict.fromkeys(each.phase for each in checkpoints))
    x_of = _places(checkpoints)
    place = {each.name: (x_of[each.name], 30 + phases.index(each.phase) * _ROW) for each in checkpoints}
    kept = sum(each.is_kept for each in checkpoints)
    drawing = Drawing(
        "Checkpoints and their descent",
        f"{len(checkpoints):,} checkpoints in {len(phases)} phases, of which {kept:,} are kept.",
        max(x_of.values()) + 60,
        30 + len(phases) * _ROW,
    )
    for edge in lineage.edges:
        if edge.source in place and edge.target in place:
            style = "edge link" if edge.is_link else "edge"
            drawing.strokes.append(Stroke(*place[edge.source], *place[edge.target], style))
    for phase in phases:
        drawing.words.append(Word(_LEFT - 16, 34 + phases.index(phase) * _ROW, shown(phase, 20), "end"))
    for each in checkpoints:
        drawing.dots.append(Dot(*place[each.name], _style(each), shown(f"{each.name}: {each.why}", 300)))
    for each in _labelled(checkpoints):
        x, y = place[each.name]
        drawing.words.append(Word(x, y + 19, f"{each.step:,}", "middle"))
    return drawing


def _places(checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
    """Return the horizontal place of each checkpoint: by its step, then by its phase, so that the first checkpoint of a
    phase stands to the right of the one whose files it refers to."""
    phases = list(dict.fromkeys(each.phase for each in checkpoints))
    x, places, was_kept = _LEFT, dict[str, int](), False
    for each in sorted(checkpoints, key=lambda each: (each.step, phases.index(each.phase))):
        if places:
            x += _STEP if each.is_kept or was_kept else _SMALL_STEP
        places[each.name], was_kept = x, each.is_kept
    return places


def _style(each: Checkpoint) -> str:
    if not each.is_kept:
        return "gone"
    return "linked" if each.link is not None else "kept"


def _labelled(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the first and last checkpoint of each phase, whose steps are written."""
    by_phase: dict[str, list[Checkpoint]] = {}
    for each in checkpoints:
        by_phase.setdefault(each.phase, []).append(each)
    return [each for own in by_phase.values() for each in ([own[0], own[-1]] if len(own) > 2 else own[:1])]


def draw_time_line(runs: Sequence[Run]) -> Drawing | None:
    """Return the runs of a job on a clock, a row for each phase; None without a recorded run."""
    found = runs[-_MOST_RUNS:]
    if not found:
        return None
    begin = min(run.begin for run in found)
    end = max(run.begin if run.end is None else run.end for run in found)
    scale, phases = 800 / (max(end - begin, 1e-3)), list(dict.fromkeys(run.phase for run in found))
    drawing = Drawing(
        "Runs on a clock",
        f"{len(found)} runs from {utc(begin)} to {utc(end)} UTC.",
        _LEFT + 800 + 60,
        24 + len(phases) * _ROW + 24,
    )
    for phase in phases:
        drawing.words.append(Word(_LEFT - 16, 44 + phases.index(phase) * _ROW, shown(phase, 20), "end"))
    for run in found:
        x, y = _LEFT + (run.begin - begin) * scale, 24 + phases.index(run.phase) * _ROW
        width = max(3.0, ((end if run.end is None else run.end) - run.begin) * scale)
        drawing.boxes.append(Box(x, y, width, 28, _run_style(run), run_hint(run)))
    bottom = 24 + len(phases) * _ROW + 12
    drawing.words.append(Word(_LEFT, bottom, f"{utc(begin)} UTC"))
    drawing.words.append(Word(_LEFT + 800, bottom, f"{utc(end)} UTC", "end"))
    return drawing


def _run_style(run: Run) -> str:
    known = {"Succeeded": "succeeded", "Yielded": "yielded"}
    if run.outcome is None:
        return "unknown"
    return f"{known.get(run.outcome, 'failed')} {'delink' if run.stage == 'delink' else ''}".strip()


def run_hint(run: Run) -> str:
    what = f"delink into phase {run.phase}" if run.stage == "delink" else f"phase {run.phase} from step {run.step:,}"
    restart = f", restart {run.restart} in place" if run.restart else ""
    return shown(f"{what}, execution {run.execution}{restart}: {run.outcome or 'no end is recorded'}", 300)


_PLAN_WIDTH, _PLAN_ROW = 900, 24


def draw_plan(picture: StepPicture) -> Drawing:
    """Return the records of a step, a row for each stream of a rank. Records that take no time are drawn as lines."""
    scale = _PLAN_WIDTH / max(picture.duration, 1e-9)
    drawing = Drawing(
        f"Step of phase {shown(picture.phase, 40)}",
        f"{sum(len(stream.spans) for stream in picture.streams):,} records on {len(picture.streams)} streams;"
        f" the step takes as long as {picture.duration:.4g} forward passes of a layer.",
        _LEFT + _PLAN_WIDTH + 20,
        len(picture.streams) * _PLAN_ROW + 30,
    )
    for row, stream in enumerate(picture.streams):
        y = 4 + row * _PLAN_ROW
        drawing.words.append(Word(_LEFT - 10, y + 14, stream_name(stream), "end"))
        drawing.strokes.append(Stroke(_LEFT, y + 19.5, _LEFT + _PLAN_WIDTH, y + 19.5, "base"))
        for span in stream.spans:
            x, width = _LEFT + span.begin * scale, (span.end - span.begin) * scale
            style = span.kind.lower() if span.kind in KINDS else "other"
            drawing.boxes.append(Box(x, y, max(width, 1.5), 18, style, shown(span.name, 200)))
    bottom = len(picture.streams) * _PLAN_ROW + 20
    drawing.words.append(Word(_LEFT, bottom, "0"))
    drawing.words.append(Word(_LEFT + _PLAN_WIDTH, bottom, f"{picture.duration:.4g} forward passes of a layer", "end"))
    return drawing


def stream_name(stream: Stream) -> str:
    return f"rank {stream.rank} {stream.resource}"
