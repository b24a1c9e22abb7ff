"""The live page in a real browser: lists, live changes, zoom, attacks, and many jobs and steps."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.training.metrics_file import truncate_after
from pseudoreal_trainer.ui.folders import LocalRuns
from pseudoreal_trainer.ui.view import Command, Listing, Row, Table

from tests.support.browser import PHONE, Opened
from tests.support.depth import DEPTH
from tests.support.live_page import Live, Written, rows_of, served, source_of, view_of
from tests.support.patience import wait_for
from tests.unit.trainer.report.support.hostile import ATTACKS, hostile_job
from tests.unit.trainer.report.support.jobs import entry, job, line, started, write_folder

pytestmark = pytest.mark.browser

LIVE_SECONDS = 2.0
"""Seconds within which a change of the files is on the page."""
SCRIPT_SECONDS = 0.25
"""Most seconds of scripts for a change of 10,000 steps."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def live(runs: Path) -> Iterator[Live]:
    with served(LocalRuns(runs)) as live:
        yield live


@pytest.fixture
def config(config: Callable[..., PhaseConfig]) -> PhaseConfig:
    return config(0)


class Run:
    """A run whose files the test writes as a trainer would."""

    def __init__(self, folder: Path, config: PhaseConfig, steps: int = 40) -> None:
        self.folder, self._config, self._entries = folder, config, 1
        now = started(config, 0).model_copy(update={"time": time.time()})
        write_folder(folder, [line(step) for step in range(1, steps + 1)], [now])

    def train(self, *lines: bytes) -> None:
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(b"".join(each + b"\n" for each in lines))

    def record(self, event: str, **fields: Any) -> None:
        made = started(self._config, 0, **fields) if event == "Started" else entry(event, 0, **fields)
        made = made.model_copy(update={"time": time.time()})
        (self.folder / "history" / f"{self._entries:020d}.json").write_text(made.to_json())
        self._entries += 1


def opened(browser: Browser, live: Live, name: str = "", **context: Any) -> Opened:
    """Return the list, or the page of the job `name`, opened as the command says."""
    found = Opened(browser, live.url, **context)
    if name:
        link = found.page.get_by_role("link", name=name, exact=True)
        wait_for(name, lambda: link.count() == 1)
        link.click()
        found.page.wait_for_url("**/job/**")
        found.await_true("document.documentElement.dataset.drawn")
    # The stream is open: the page has taken the message that scripts are missing away.
    found.await_true("document.getElementById('connection').hidden")
    return found


def seconds_until(page: Page, expression: str) -> float:
    begin = time.monotonic()
    wait_for(expression, lambda: page.evaluate(f"Boolean({expression})"), page.content, pause=0.02)
    return time.monotonic() - begin


NEWEST = "[...document.querySelectorAll('#summary dd')][0].textContent"


def test_the_list_leads_to_the_whole_page_of_a_job(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    Run(runs / "whole", config)
    found = opened(browser, live, "whole")
    page = found.page
    assert page.url == live.at(page.url.partition(f":{live.port}")[2])
    assert "token" not in page.url
    for heading in ("Summary", "Figures", "Restarts", "Checkpoints", "Step plans", "Samples", "Commands"):
        assert page.get_by_role("heading", name=heading, exact=True).count() == 1
    assert page.get_by_role("heading", name="Now Training").count() == 1
    assert page.locator(".plot canvas").count() == page.locator(".plot").count() >= 6
    assert page.get_by_role("img", name="from 5 at step 1").count() == 1
    assert page.evaluate(NEWEST) == "40"
    page.get_by_role("link", name="all jobs").click()
    assert page.get_by_role("row", name="whole").get_by_text("Training").count() == 1
    assert found.errors == []
    assert {url.partition("/")[2].split("/")[1].partition(":")[0] for url in found.requests if "://" in url} == {
        "127.0.0.1"
    }


def test_new_steps_are_on_the_page_within_two_seconds(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    run = Run(runs / "steps", config)
    found = opened(browser, live, "steps")
    for step in range(41, 44):
        run.train(line(step, validation_loss=2.5))
        assert seconds_until(found.page, f"{NEWEST} === '{step}'") < LIVE_SECONDS
    # The figure has the new curve, too: its table, its sentence, its legend.
    assert found.page.get_by_role("img", name="validation: from 2.5 at step 41").count() == 1
    assert found.errors == []


def test_a_restart_is_on_the_page_within_two_seconds(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    run = Run(runs / "restart", config)
    found = opened(browser, live, "restart")
    page = found.page
    assert page.get_by_text("No restart is recorded.").count() == 1
    run.record("Ended", outcome="Failed", message="rank 1 was killed", ranks=[1], pod="tiny-1", node="gpu-7")
    assert seconds_until(page, "document.querySelector('#now').textContent.includes('Failed')") < LIVE_SECONDS
    truncate_after(run.folder / "metrics.jsonl", 30)
    run.record("Started", step=30, execution=2)
    cause = "document.querySelector('#restarts').textContent.includes('rank 1 was killed')"
    assert seconds_until(page, cause) < LIVE_SECONDS
    row = page.get_by_role("row", name="rank 1 was killed")
    assert all(row.get_by_text(text, exact=True).count() == 1 for text in ("tiny-1", "gpu-7", "2", "30"))
    assert page.get_by_role("heading", name="Now Training").count() == 1
    run.train(line(31, seconds=1.0), line(32, seconds=2.0))
    assert seconds_until(page, f"{NEWEST} === '32'") < LIVE_SECONDS
    assert page.locator("#loss li", has_text="restart at step 30").count() == 1
    assert found.errors == []


def test_a_zoomed_figure_an_open_table_and_the_focus_stay(
    browser: Browser, live: Live, runs: Path, config: Any
) -> None:
    run = Run(runs / "zoom", config, steps=100)
    found = opened(browser, live, "zoom")
    page = found.page
    plot = page.locator("#loss .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    axis = """() => document.querySelector("#loss canvas").toDataURL()"""
    whole = page.evaluate(axis)
    # Drag over the middle half.
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 3 * box["width"] / 4, box["y"] + 50, steps=5)
    page.mouse.up()
    page.mouse.move(0, 0)
    wait_for("the zoom", lambda: page.evaluate(axis) != whole)
    summary = page.get_by_text("Table of loss")
    summary.click()
    summary.focus()
    page.evaluate("window.kept = document.querySelector('#loss canvas')")
    before = page.evaluate(axis)
    run.train(*(line(step, loss=0.01) for step in range(101, 131)))
    assert seconds_until(page, f"{NEWEST} === '130'") < LIVE_SECONDS
    # The canvas is the same element, and still shows the same steps: none of the new ones.
    assert page.evaluate("window.kept === document.querySelector('#loss canvas') && window.kept.isConnected")
    assert page.evaluate(axis) == before
    assert page.get_by_role("table", name="Loss").is_visible()
    assert "130" in page.get_by_role("table", name="Loss").inner_text()
    assert page.evaluate("document.activeElement.textContent") == "Table of loss"
    plot.dblclick()
    wait_for("all steps are drawn", lambda: page.evaluate(axis) != before)
    assert found.errors == []


def test_selected_text_is_left_alone_until_it_is_no_longer_selected(
    browser: Browser, live: Live, runs: Path, config: Any
) -> None:
    run = Run(runs / "selected", config)
    page = opened(browser, live, "selected").page
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#summary h2'))")
    run.train(line(41))
    wait_for("figures", lambda: page.get_by_role("img", name="at step 41").count() > 0)
    assert page.evaluate("getSelection().toString()") == "Summary"
    assert page.evaluate(NEWEST) == "40"
    page.evaluate("getSelection().removeAllRanges()")
    assert seconds_until(page, f"{NEWEST} === '41'") < LIVE_SECONDS


def test_two_tabs_show_the_same_and_share_one_reading(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    run = Run(runs / "tabs", config)
    first = opened(browser, live, "tabs")
    second = first.context.new_page()
    second.goto(first.page.url)
    other = opened(browser, live).page
    run.train(line(41))
    for page in (first.page, second):
        assert seconds_until(page, f"{NEWEST} === '41'") < LIVE_SECONDS
    row = other.get_by_role("row", name="tabs")
    wait_for("the list", lambda: "41 of 100" in row.inner_text())
    assert first.errors == []


def test_a_new_run_and_a_removed_one_change_the_list(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    found = opened(browser, live)
    Run(runs / "deep" / "er" / "new", config)
    row = found.page.get_by_role("row", name="deep/er/new")
    wait_for("the new run", lambda: row.count() == 1)
    (runs / "deep").rename(runs.parent / "elsewhere")
    wait_for("it is gone", lambda: row.count() == 0)
    assert found.errors == []


def test_a_server_that_is_gone_is_said_and_the_page_stays(browser: Browser, runs: Path, config: Any) -> None:
    Run(runs / "gone", config)
    with served(LocalRuns(runs)) as ended:
        found = opened(browser, ended, "gone")
    page = found.page
    wait_for("the page says so", lambda: "connection to pseudoreal ui is lost" in page.inner_text("#connection"))
    assert page.evaluate(NEWEST) == "40"
    assert page.get_by_role("status").filter(has_text="lost").is_visible()


# With content that a test writes


def test_filters_leave_the_jobs_that_fit_and_survive_a_reload(browser: Browser) -> None:
    rows = [
        Row("a/one", "one", "a", "Training", "pseudo", "5", "3.1"),
        Row("a/two", "two", "a", "Failed", "real", "9", "2.1", note="rank 3 is out of memory"),
        Row("b/three", "three", "b", "Training", "real", "7", "2.2"),
    ]
    source = source_of(rows)
    with served(source) as live:
        found = opened(browser, live)
        page = found.page

        def names() -> list[str]:
            return [each.inner_text() for each in page.locator("tbody tr:visible th").all()]

        assert names() == ["one", "two", "three"]
        page.get_by_label("State").select_option("Training")
        assert names() == ["one", "three"]
        page.get_by_label("Namespace").select_option("b")
        assert (names(), page.inner_text("#count")) == (["three"], "1 of 3 jobs")
        page.get_by_label("State").select_option("")
        page.get_by_label("Namespace").select_option("")
        page.get_by_label("Phase").select_option("real")
        page.get_by_label("Text").fill("MEMORY rank")
        assert names() == ["two"]
        page.reload()
        wait_for("the filters are back", lambda: names() == ["two"])
        assert "text=MEMORY+rank" in page.url
        # A filter holds for what comes, too.
        more = [
            *rows,
            Row("b/four", "four", "b", "Queued", "real", note="out of memory, rank 1"),
            Row("b/5", "5", "b", "X"),
        ]
        source.rows.write(Listing(more))
        wait_for("a new job that fits", lambda: names() == ["two", "four"])
        page.get_by_label("Text").fill("")
        assert {"Queued", "X", "Training", "Failed"} <= {*page.get_by_label("State").inner_text().split()}
        assert found.errors == []


def test_five_hundred_jobs_are_listed_filtered_and_changed_without_lag(browser: Browser) -> None:
    rows = rows_of(500)
    source = source_of(rows)
    with served(source) as live:
        found = opened(browser, live)
        page = found.page
        assert page.inner_text("#count") == "500 jobs"
        taken = page.evaluate(
            """() => { const begin = performance.now(); const text = document.querySelector("[name=text]");
                text.value = "job-499"; text.dispatchEvent(new Event("input", { bubbles: true }));
                return (performance.now() - begin) / 1000; }"""
        )
        assert taken < SCRIPT_SECONDS
        assert page.inner_text("#count") == "1 of 500 jobs"
        rows = [*rows_of(500, "Failed")[:250], *rows[250:499], Row("team/new", "new", "team", "Queued")]
        source.rows.write(Listing(rows))
        wait_for("the change", lambda: page.evaluate("document.documentElement.dataset.updated"))
        assert float(page.evaluate("document.documentElement.dataset.updateSeconds")) < SCRIPT_SECONDS
        page.get_by_label("Text").fill("")
        page.get_by_label("State").select_option("Failed")
        assert page.inner_text("#count") == "250 of 500 jobs"
        assert found.errors == []


def test_ten_thousand_steps_are_drawn_again_without_lag(browser: Browser, live: Live, runs: Path, config: Any) -> None:
    run = Run(runs / "long", config, steps=10_000)
    found = opened(browser, live, "long")
    page = found.page
    taken = []
    for step in range(10_001, 10_004):
        run.train(line(step))
        assert seconds_until(page, f"{NEWEST} === '{step:,}'") < 2 * LIVE_SECONDS
        taken.append(float(page.evaluate("document.documentElement.dataset.updateSeconds")))
    assert min(taken) < SCRIPT_SECONDS, taken
    assert found.errors == []


@pytest.mark.parametrize("attack", DEPTH.of(ATTACKS[::2], ATTACKS))
def test_no_text_of_a_job_runs_or_loads_anything(attack: str, browser: Browser, config: Any) -> None:
    """As the page is first sent, and as a change of it."""
    shown = Written(view_of(job([line(1)])))
    source = source_of(jobs={attack: shown})
    source.rows.content = Listing([Row(attack, *([attack] * 9))], [attack])
    with served(source) as live:
        found = opened(browser, live)
        page = found.page
        source.rows.write(
            Listing([Row(attack, *([f"{attack}2"] * 9)), Row("x", attack, attack, attack)], [f"{attack}2"])
        )
        wait_for("the change", lambda: page.locator("tbody tr").count() == 2)
        page.locator("tbody a").first.click()
        found.await_true("document.documentElement.dataset.drawn")
        hostile = hostile_job(config, attack)
        tables = [Table(attack, [attack, attack], [[attack, attack]])]
        commands = [Command(attack, attack, attack)]
        for times in (1, 2):
            text = attack * times
            view = view_of(
                hostile, name=text, place=text, state=text, facts=[(text, text)], tables=tables,
                description=[text], commands=commands, notices=[text],
            )  # fmt: skip
            shown.write(view)
            wait_for("the change", lambda: page.locator("#now .notice").count() == 1)
            for summary in page.locator("summary").all():
                summary.click()
        page.locator("#loss .u-over").hover()
        found.await_true("document.querySelector('#loss .readout').textContent !== ''")
        assert page.evaluate("window.hit") is None
        assert page.locator("main img, main iframe, main object, main script").count() == 0
        assert found.errors == []
        assert all(url.startswith(live.at("/")) for url in found.requests)


def test_the_policy_stops_a_script_that_got_into_a_part_all_the_same(browser: Browser) -> None:
    """As if a defect of a template had let an element through."""
    with served(source_of(rows_of(1))) as live:
        found = opened(browser, live)
        found.page.evaluate(
            """document.querySelector("main").insertAdjacentHTML("beforeend",
                '<img src="/x" onerror="window.hit=1"><a id="j" href="javascript:window.hit=1">x</a>');
            const script = document.createElement("script"); script.textContent = "window.hit = 1";
            document.body.append(script);"""
        )
        found.page.click("#j")
        assert found.page.evaluate("window.hit") is None
        assert found.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 1, () => 0)") == 0
        assert sum("Content Security Policy" in error for error in found.errors) >= 4


def test_another_page_in_the_browser_can_neither_read_nor_frame_this_one(browser: Browser) -> None:
    """Another server on this machine, so even the cookie's host is the same: the policies of origins must hold."""
    with served(source_of(rows_of(1))) as live, served(source_of(rows_of(1))) as other:
        found = opened(browser, live)
        found.page.goto(other.url)
        # Without this server's own policy, as that of an attacker would be.
        page = found.context.new_page()
        page.route("**/evil", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
        page.goto(f"http://localhost:{other.port}/evil")
        read = """async (url) => { try { return await (await fetch(url, { credentials: "include" })).text(); }
            catch (error) { return "refused"; } }"""
        assert page.evaluate(read, live.at("/")) == "refused"
        page.evaluate(f"document.body.innerHTML = '<iframe src=\"{live.at('/')}\"></iframe>'")
        wait_for("the frame", lambda: len(page.frames) == 2 and page.frames[1].url != "about:blank")
        assert "job-0" not in page.frames[1].content()


def test_a_job_that_is_deleted_stays_on_its_page(browser: Browser) -> None:
    shown = Written(view_of(job([line(1), line(2)])))
    with served(source_of(rows_of(2), {"team/job-1": shown})) as live:
        found = opened(browser, live, "job-1")
        shown.write(dataclasses.replace(shown.content, is_gone=True, state="Deleted"))
        wait_for("it is said", lambda: found.page.get_by_role("alert").count() == 1)
        assert found.page.get_by_role("heading", name="Now Deleted").count() == 1
        assert found.page.locator(".plot canvas").count() > 0


def test_a_command_is_copied_as_text(browser: Browser) -> None:
    shown = Written(
        view_of(job([line(1)]), commands=[Command("Stop", "pseudoreal suspend 'a b' -n team", "it is over")])
    )
    with served(source_of(rows_of(2), {"team/job-1": shown})) as live:
        found = opened(browser, live, "job-1", permissions=["clipboard-read", "clipboard-write"])
        found.page.get_by_role("button", name="Copy: Stop").click()
        wait_for("Copied", lambda: found.page.get_by_text("Copied").count() == 1)
        assert found.page.evaluate("navigator.clipboard.readText()") == "pseudoreal suspend 'a b' -n team"
        assert found.page.get_by_text("Not now: it is over").is_visible()


@pytest.mark.parametrize("size", [PHONE, {"viewport": {"width": 1280, "height": 900}}], ids=["phone", "desk"])
def test_no_page_is_wider_than_the_screen(size: dict[str, Any], browser: Browser, config: Any) -> None:
    long = "x" * 300
    shown = Written(
        view_of(
            hostile_job(config, long),
            facts=[("State", long)],
            tables=[Table("Events", ["a", "b"], [[long, long]])],
            commands=[Command(long, long)],
            description=[long * 5],
        )
    )
    rows = [*rows_of(3), Row("x", long, long, long, long, long, long, long, long, long)]
    with served(source_of(rows, {"team/job-1": shown})) as live:
        page = opened(browser, live, **size).page
        assert page.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]
        page = opened(browser, live, "job-1", **size).page
        assert page.evaluate("document.documentElement.scrollWidth") <= size["viewport"]["width"]


def test_without_scripts_the_page_shows_everything_and_says_that_it_stands_still(browser: Browser) -> None:
    shown = Written(view_of(job([line(1), line(2)])))
    with served(source_of(rows_of(2), {"team/job-1": shown})) as live:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto(live.url)
        assert page.get_by_text("Without scripts this page does not change by itself").is_visible()
        page.get_by_role("link", name="job-1").click()
        assert page.locator("#loss table").count() == 1


def test_keyboard_and_screen_reader_find_the_filters_and_the_jobs(browser: Browser) -> None:
    with served(source_of(rows_of(3))) as live:
        page = opened(browser, live).page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the jobs"
        page.keyboard.press("Tab")
        page.keyboard.type("job-2")
        assert page.get_by_role("status").filter(has_text="1 of 3 jobs").count() == 1
        assert page.get_by_role("row", name="job-2 Training").count() == 1
        assert page.get_by_role("search").get_by_role("combobox").count() == 3
