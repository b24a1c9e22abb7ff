"""The page in a real browser: Debian's chromium, without a window."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from pseudoreal_trainer.report.job import Job
from pseudoreal_trainer.report.page import html_of, page_of

from tests.support.browser import PHONE, Opened, await_true
from tests.support.patience import wait_for
from tests.unit.trainer.report.support.hostile import ATTACKS, hostile_job
from tests.unit.trainer.report.support.jobs import NOON, entry, job, line, started

pytestmark = pytest.mark.browser

DRAWN = "document.documentElement.dataset.drawn"


class _Opened(Opened):
    def __init__(self, browser: Browser, file: Path, **context: Any) -> None:
        super().__init__(browser, file.as_uri(), **context)
        self.await_true(DRAWN)


def _written(folder: Path, *jobs: Job) -> Path:
    file = folder / "report.html"
    file.write_text(html_of(page_of(jobs), NOON))
    return file


def _long_job(config: Any) -> Job:
    lines = [
        line(step, "pseudo" if step <= 6000 else "real", loss=99.0 if step == 4321 else 2.0 + 3.0 / step)
        for step in range(1, 10_001)
    ]
    history = [
        *(started(config(0), 0), entry("Ended", 50, outcome="Failed", message="rank 1 died", ranks=[1])),
        *(started(config(0), 60, step=40, execution=2), started(config(1), 900, step=6000, execution=2)),
    ]
    return job(lines, history=history)


def test_ten_thousand_steps_are_drawn_and_redrawn_without_lag(browser: Browser, config: Any, tmp_path: Path) -> None:
    opened = _Opened(browser, _written(tmp_path, _long_job(config)))
    page = opened.page
    charts = page.locator(".plot canvas").count()
    assert charts == page.locator(".plot").count() >= 6
    for axis in ("tokens", "seconds"):
        before = time.monotonic()
        page.get_by_role("radio", name=axis).check()
        await_true(page, f"{DRAWN} === '{axis} {charts}'")
        # Far more than it takes, because other tests run beside this one.
        assert time.monotonic() - before < 10
    assert (opened.errors, opened.requests) == ([], [opened.page.url])


def test_a_curve_has_ink_in_its_own_colour_in_light_and_dark(browser: Browser, config: Any, tmp_path: Path) -> None:
    """Pixels of the canvas, so that a chart that draws nothing fails; another scheme redraws it."""
    file = _written(tmp_path, _long_job(config))
    count = """colour => {
        const canvas = document.querySelector("#loss canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
        let found = 0;
        for (let at = 0; at < pixels.length; at += 4)
            found += Math.abs(pixels[at] - r) + Math.abs(pixels[at + 1] - g) + Math.abs(pixels[at + 2] - b) < 40
                && pixels[at + 3] > 128;
        return found;
    }"""
    page = _Opened(browser, file, color_scheme="light").page
    light, dark = "#0969da", "#58a6ff"

    def await_ink(colour: str, other: str) -> None:
        wait_for("ink", lambda: page.evaluate(count, colour) > 500 and page.evaluate(count, other) < 50)

    await_ink(light, dark)
    page.emulate_media(color_scheme="dark")
    await_ink(dark, light)
    page.emulate_media(media="print", color_scheme="dark")
    await_ink(light, dark)


@pytest.mark.parametrize("size", [PHONE, {"viewport": {"width": 1280, "height": 900}}], ids=["phone", "desk"])
def test_the_page_is_never_wider_than_the_screen(
    size: dict[str, Any], browser: Browser, config: Any, tmp_path: Path
) -> None:
    file = _written(tmp_path, _long_job(config), hostile_job(config(0), "x" * 1000))
    page = _Opened(browser, file, **size).page
    assert page.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]
    plots = page.locator(".plot").evaluate_all(
        "all => all.map((each) => [each.clientWidth, each.firstChild.offsetWidth])"
    )
    assert all(0 < inner <= outer for outer, inner in plots)


def test_keyboard_reaches_axes_tables_and_sections(browser: Browser, config: Any, tmp_path: Path) -> None:
    page = _Opened(browser, _written(tmp_path, _long_job(config))).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    page.get_by_role("radio", name="steps").focus()
    page.keyboard.press("ArrowRight")
    await_true(page, f"{DRAWN}.startsWith('tokens')")
    table = page.get_by_role("table", name="Loss")
    assert not table.is_visible()
    page.get_by_text("Table of loss").focus()
    page.keyboard.press("Enter")
    assert table.is_visible()
    assert "99" in table.inner_text()


def test_a_screen_reader_finds_names_and_summaries(browser: Browser, config: Any, tmp_path: Path) -> None:
    page = _Opened(browser, _written(tmp_path, _long_job(config))).page
    assert page.get_by_role("img", name="highest 99 at step 4,321").count() == 1
    assert page.get_by_role("img").count() == page.get_by_role("img", name=" ").count() > 8, "each has a name"
    assert page.get_by_role("navigation", name="Sections").get_by_role("link").count() >= 6
    for heading in ("Summary", "Figures", "Restarts", "Checkpoints", "Step plans", "Samples"):
        assert page.get_by_role("heading", name=heading, exact=True).count() == 1
    assert page.get_by_role("row", name="rank 1 died").count() == 1


def test_without_scripts_the_tables_have_the_curves(browser: Browser, config: Any, tmp_path: Path) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(_written(tmp_path, _long_job(config)).as_uri())
    assert page.get_by_text("Without scripts the figures are not drawn").is_visible()
    assert page.locator("#loss table").count() == 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_of_a_job_runs_or_loads_anything(attack: str, browser: Browser, config: Any, tmp_path: Path) -> None:
    opened = _Opened(browser, _written(tmp_path, hostile_job(config(0), attack)))
    page = opened.page
    for summary in page.locator("summary").all():
        summary.click()
    page.locator("#loss .u-over").hover()
    await_true(page, "document.querySelector('#loss .readout').textContent !== ''")
    assert page.evaluate("window.hit") is None
    assert page.locator("script").count() == 3
    assert page.locator("main img, main iframe, main object").count() == 0
    assert (opened.errors, opened.requests) == ([], [page.url])


def test_the_policy_stops_a_script_that_got_into_the_page_all_the_same(
    browser: Browser, config: Any, tmp_path: Path
) -> None:
    """As if a defect of the template had let an element through."""
    file = _written(tmp_path, _long_job(config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        hole = f"""<main><img src="{url}" onerror="window.hit=1"><script>window.hit=1</script>
            <script src="{url}"></script><link rel="stylesheet" href="{url}">"""
        file.write_text(file.read_text().replace("<main>", hole))
        opened = _Opened(browser, file)
        assert opened.page.evaluate("window.hit") is None
        opened.page.evaluate(f"fetch('{url}').catch(() => 0)")
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert sum("Content Security Policy" in error for error in opened.errors) >= 4
