"""Pages as HTML, in parts, so that a page that is open gets only the parts that have changed. Pure.

A part is the content of an element that names it (`data-part`), or a row of the list, or a figure. The script of the
page puts a new part in the place of the old one. Jinja2 escapes every value.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import jinja2

from pseudoreal_trainer.report import page as report
from pseudoreal_trainer.report.text import shown
from pseudoreal_trainer.ui.view import JobView, Labels, Listing

_PACKAGE = "pseudoreal_trainer.ui"
_REPORT_PARTS = ("summary", "restarts", "checkpoints", "plans", "samples", "unknown")
_JOB_PARTS = ("now", "commands", "tables", "description")
ROW, FIGURE = "row/", "figure/"
"""Beginnings of the names of parts that stand in an order."""

_CLASSES = {
    **dict.fromkeys(("Training", "Delinking"), "moving"),
    "Complete": "good",
    **dict.fromkeys(("Failed", "Unreadable", "Deleted"), "bad"),
}
"""State of a job -> class of the page's style sheet; all others are still."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Content:
    """All parts of a page at one moment."""

    title: str
    parts: Mapping[str, str]
    """Name -> HTML."""
    order: Sequence[str] = ()
    """Names of the rows or figures, in order."""
    charts: str = ""
    """Points of the figures, as JSON; empty: the page has no figures."""
    digest: str = field(init=False)
    """Equal for two contents that are the same."""

    def __post_init__(self) -> None:
        whole = json.dumps([self.title, [*self.parts.items()], [*self.order], self.charts])
        object.__setattr__(self, "digest", blake2b(whole.encode(errors="replace"), digest_size=12).hexdigest())


def list_content(listing: Listing, labels: Labels) -> Content:
    template = _environment().get_template("row.html.j2")
    rows = {f"{ROW}{row.id}": template.render(row=row) for row in listing.rows}
    notices = _environment().get_template("notices.html.j2").render(notices=listing.notices, jobs=len(rows))
    return Content(labels.title, {**rows, "notices": notices}, [*rows])


def job_content(view: JobView) -> Content:
    page, templates = report.page_of([view.job]), _environment()
    parts = {name: templates.get_template(f"{name}.html.j2").render(view=view) for name in _JOB_PARTS}
    parts |= {name: templates.get_template(f"{name}.html.j2").render(page=page) for name in _REPORT_PARTS}
    figure = templates.get_template("figure.html.j2")
    figures = {f"{FIGURE}{chart.id}": figure.render(chart=chart) for chart in page.charts}
    charts = json.dumps(report.data_of(page.charts), allow_nan=False, separators=(",", ":"))
    return Content(shown(view.name, 200), parts | figures, [*figures], charts)


def list_page(content: Content, labels: Labels) -> str:
    """Return the page of the list; its script is `live.js` alone."""
    return _environment().get_template("list.html.j2").render(content=content, labels=labels)


def job_page(content: Content, id: str) -> str:
    """Return the page of a job."""
    template = _environment().get_template("job.html.j2")
    return template.render(content=content, id=id, data=json.loads(content.charts), library=report.PLOTTING_LIBRARY)


def message_page(title: str, sentence: str) -> str:
    return _environment().get_template("message.html.j2").render(title=title, sentence=sentence)


def changes(before: Content | None, now: Content) -> str:
    """Return what a page that shows `before` needs in order to show `now`, as JSON. None: the page shows nothing."""
    known = before.parts if before else {}
    change: Json = {
        "title": now.title,
        "digest": now.digest,
        "parts": {name: text for name, text in now.parts.items() if known.get(name) != text},
    }
    if before is None or before.order != now.order:
        change["order"] = [*now.order]
    # Points go as they are: they are JSON.
    is_new = bool(now.charts) and (before is None or before.charts != now.charts)
    charts = f',"charts":{now.charts}' if is_new else ""
    return f"{json.dumps(change, separators=(',', ':'))[:-1]}{charts}}}"


@cache
def assets() -> dict[str, str]:
    """Return the name and the text of each style sheet and script."""
    own = {
        name: files(_PACKAGE).joinpath("assets", name).read_text(encoding="utf-8") for name in ("live.css", "live.js")
    }
    return {name: report.asset(name) for name in (*report.STYLES, *report.SCRIPTS)} | own


@cache
def _environment() -> jinja2.Environment:
    environment = report.environment(_PACKAGE)
    environment.filters["state_class"] = _state_class
    return environment


def _state_class(state: str) -> str:
    return _CLASSES.get(state, "still")
