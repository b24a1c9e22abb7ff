"""The page as HTML: one file without a server, without a network, and without a script but its own.

Jinja2 escapes every value. The figures stand in the page as JSON in which no text can end the element. A content
security policy allows the scripts and the style sheet by their hashes and nothing else, so that a text that became an
element all the same could neither run nor load anything.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from pseudoreal_api.quantity import readable_bytes

from pseudoreal_trainer.report.differences import MOST_DIFFERENCES, Difference, differences_of
from pseudoreal_trainer.report.drawings import MOST_DOTS, draw_lineage, draw_plan, draw_time_line, run_hint, stream_name
from pseudoreal_trainer.report.figures import Chart, charts_of, readable
from pseudoreal_trainer.report.job import Job
from pseudoreal_trainer.report.restarts import utc
from pseudoreal_trainer.report.step_plan import KINDS
from pseudoreal_trainer.report.steps import TRAINED_SECONDS
from pseudoreal_trainer.report.text import shown

_PACKAGE = "pseudoreal_trainer.report"
PLOTTING_LIBRARY = "uPlot 1.6.32"
STYLES, SCRIPTS = ("uPlot.min.css", "page.css"), ("uPlot.iife.min.js", "page.js")
"""Files in `assets/` that a page needs, in their order."""
_IN_TABLES = ("rows", "summary")
"""Fields of a line that stand in the page's HTML."""


@dataclass(frozen=True)
class Page:
    """Content of a page. A live page shows the same."""

    title: str
    jobs: Sequence[Job]
    charts: Sequence[Chart]
    differences: Sequence[Difference]


def page_of(jobs: Sequence[Job]) -> Page:
    names = " and ".join(shown(job.label, 60) for job in jobs[:3])
    title = names if len(jobs) <= 3 else f"{names} and {len(jobs) - 3} more"
    return Page(title, jobs, charts_of(jobs), differences_of([job.phases for job in jobs]) if len(jobs) > 1 else [])


def html_of(page: Page, written: float) -> str:
    """Return the page as HTML. `written`: time at which it is written, in seconds since the epoch."""
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            policy=_policy(styles, scripts),
            # Markup: these are files of this package, and their hashes are of exactly these characters.
            styles=[Markup(text) for text in styles],  # noqa: S704
            scripts=[Markup(text) for text in scripts],  # noqa: S704
            data={"charts": data_of(page.charts)},
            written=utc(written),
            library=PLOTTING_LIBRARY,
        )
    )


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return the content security policy. No `'unsafe-inline'`: attributes such as onclick and style do nothing."""
    return (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)};"
        " img-src 'none'; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def data_of(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return what the page's script draws: the charts without their tables."""
    return [_data(chart) for chart in charts]


def _data(chart: Chart) -> dict[str, Any]:
    lines = [{name: value for name, value in asdict(line).items() if name not in _IN_TABLES} for line in chart.lines]
    return {"id": chart.id, "unit": chart.unit, "lines": lines, "marks": [asdict(mark) for mark in chart.marks]}


@cache
def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return files(_PACKAGE).joinpath("assets", name).read_text(encoding="utf-8")


@cache
def environment(*packages: str) -> jinja2.Environment:
    """Return the templates of the page, and those in `assets/` of other packages."""
    loaders = [jinja2.PackageLoader(package, "assets") for package in (_PACKAGE, *packages)]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"most_differences": MOST_DIFFERENCES, "most_dots": MOST_DOTS, "kinds": KINDS}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "shown": shown,
        "utc": utc,
        "bytes": readable_bytes,
        "readable": readable,
        "count": lambda number: f"{number:,}",
        "ranks": _ranks,
        "lineage": lambda job: draw_lineage(job.lineage),
        "time_line": lambda job: draw_time_line(job.runs),
        "plan": draw_plan,
        "run_hint": run_hint,
        "stream_name": stream_name,
        "newest": _newest,
    }
    return environment


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text: a range, where they follow one another."""
    found = sorted(ranks)
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}–{found[-1]}"
    return ", ".join(map(str, found[:64]))


def _newest(job: Job) -> dict[str, str]:
    """Return name -> figure of the newest step, for the summary of a job."""
    steps = job.steps
    if not len(steps):
        return {}
    found = {"Step": f"{int(steps.step[-1]):,}", "Phase": shown(steps.phases[int(steps.phase[-1])], 60)}
    for name, column, unit in (
        ("Tokens", "tokens", "number"),
        ("Loss", "loss", "number"),
        ("Validation loss", "validation_loss", "number"),
        ("Tokens a second", "tokens_per_second", "number"),
        ("MFU", "mfu", "share"),
        ("Time of training", TRAINED_SECONDS, "seconds"),
    ):
        if steps.has(column):
            values = steps.column(column)
            found[name] = readable(float(values[np.isfinite(values)][-1]), unit)
    return found
