"""The page as HTML: what is in it, and what no text can put into it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest
from pseudoreal_dev.machine.paths import REPOSITORY
from pseudoreal_trainer.report.job import Job
from pseudoreal_trainer.report.page import PLOTTING_LIBRARY, html_of, page_of

from tests.unit.trainer.report.support.hostile import ATTACKS, hostile_job
from tests.unit.trainer.report.support.jobs import NOON, entry, job, line, started


class _Elements(HTMLParser):
    """All elements of a page, with the content of scripts and style sheets, as an HTML parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self._open: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs))
        self.found.append((tag, dict(attrs)))
        if tag in self.code:
            self._open = tag
            self.code[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open:
            self.code[self._open][-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _page(*jobs: Job) -> str:
    return html_of(page_of(jobs), NOON)


def _lively(config: Any, **fields: Any) -> Job:
    lines = [*(line(step, **fields) for step in range(1, 7)), *(line(step, "real") for step in range(7, 13))]
    history = [
        *(started(config(0), 0), entry("Ended", 6, outcome="OutOfMemory", message="rank 1: too much", ranks=[0, 1])),
        *(started(config(0), 7, step=3, execution=2), started(config(1), 20, step=6, execution=2)),
    ]
    return job(lines, history=history)


def test_every_figure_has_a_table_and_a_sentence(config: Any) -> None:
    elements = _Elements(_page(_lively(config)))
    pictures = [each for tag, each in elements.found if tag in ("div", "svg") and each.get("role") == "img"]
    assert len(pictures) >= 8
    assert all(picture["aria-label"] for picture in pictures)
    captions = sum(tag == "caption" for tag, _ in elements.found)
    # The phases, the restarts, and the runs' tables stand beside those of the figures.
    assert captions >= len(pictures)
    for said in (
        "training: from 5 at step 1 to 0.4167 at step 12",
        "phase real, delink from 1 to 4 blocks",
        *("rank 1: too much", "tiny-0", "gpu-0", "0, 1 (of the pod)"),
        "MFU is not known",
    ):
        assert said in elements.text or any(said in (each.get("aria-label") or "") for _, each in elements.found), said


def test_what_is_not_recorded_is_said_to_be_missing() -> None:
    text = _Elements(_page(job([line(1), line(2, seconds=0.5)]))).text
    assert "not recorded: the job has no history" in text
    assert "The configuration of the phases is not recorded." in text
    assert "No checkpoint is there." in text


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_becomes_an_element_an_attribute_or_a_script(attack: str, config: Any) -> None:
    """The elements are the same as with harmless texts, and the only scripts are the page's own."""
    hostile, harmless = (_Elements(_page(hostile_job(config(0), text))) for text in (attack, "harmless"))
    names = [[(tag, sorted(each)) for tag, each in elements.found] for elements in (hostile, harmless)]
    assert names[0] == names[1]
    assert not [name for _, each in hostile.found for name in each if name.startswith("on") or name == "style"]
    data, *scripts = hostile.code["script"]
    assert scripts == harmless.code["script"][1:]
    assert json.loads(data)["charts"]
    assert not re.search("[<>]", data), "no text of the data can end its element or begin another"
    assert "\x00" not in hostile.text
    assert "\u202e" not in hostile.text, "no text reorders the text around it"


def test_the_attack_is_shown_as_text_wherever_it_stands(config: Any) -> None:
    attack = ATTACKS[0]
    text = _Elements(_page(hostile_job(config(0), attack))).text
    # Title, folder, uid, notice, restart (cause, pod, node), runs, checkpoint, sample (prompt, text), phase.
    assert text.count(attack) >= 10


def test_the_policy_names_exactly_the_pages_own_scripts_and_styles(config: Any) -> None:
    elements = _Elements(_page(_lively(config)))
    policy = next(
        str(each["content"]) for tag, each in elements.found if each.get("http-equiv") == "Content-Security-Policy"
    )
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for name, kind, first in (("script-src", "script", 1), ("style-src", "style", 0)):
        digests = [hashlib.sha256(text.encode()).digest() for text in elements.code[kind][first:]]
        assert directives[name].split() == [f"'sha256-{base64.b64encode(each).decode()}'" for each in digests]
    assert directives["default-src"] == directives["connect-src"] == directives["base-uri"] == "'none'"
    assert "unsafe" not in policy
    policy_at = next(i for i, (_, each) in enumerate(elements.found) if "http-equiv" in each)
    assert not {"script", "style"} & {tag for tag, _ in elements.found[:policy_at]}, "it stands before what it rules"


def test_the_page_names_no_address_that_a_browser_would_load(config: Any) -> None:
    elements = _Elements(_page(_lively(config)))
    places = [each[name] for _, each in elements.found for name in ("src", "href", "action", "data") if each.get(name)]
    assert places
    assert all(str(place).startswith("#") for place in places)
    targets = {each.get("id") for _, each in elements.found}
    assert {str(place)[1:] for place in places} <= targets
    assert "@import" not in "".join(elements.code["style"])
    assert "url(" not in "".join(elements.code["style"])


def test_the_plotting_library_is_the_one_that_its_records_name() -> None:
    assets = files("pseudoreal_trainer.report").joinpath("assets")
    record, notice = assets.joinpath("README.md").read_text(), (REPOSITORY / "NOTICE").read_text()
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        content = assets.joinpath(name).read_bytes()
        assert f"| SHA-256 of `{name}` | `{hashlib.sha256(content).hexdigest()}` |" in record
    assert assets.joinpath("uPlot-LICENSE").read_text().strip() in notice
    version = PLOTTING_LIBRARY.removeprefix("uPlot ")
    assert f"(v{version})" in assets.joinpath("uPlot.iife.min.js").read_text()[:100]
    assert PLOTTING_LIBRARY in notice
    assert f"`uplot` {version}" in record


def test_ten_thousand_steps_make_a_page_of_a_few_megabytes() -> None:
    lines = [line(step, loss=5.0 + step % 7, gradient_norm=1.0 + step % 11) for step in range(1, 10_001)]
    assert len(_page(job(lines))) < 3_000_000


def test_jobs_beside_each_other_show_differences(config: Any) -> None:
    wide = config(0).model_copy(update={"batch": config(0).batch.model_copy(update={"sequences": 12})})
    jobs = [job([line(1)], history=[started(each, 0)], folder=name) for name, each in (("a", config(0)), ("b", wide))]
    text = _Elements(_page(*jobs)).text
    assert "phases[pseudo].batch.sequences 6 12" in text
