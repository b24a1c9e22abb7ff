"""The list of jobs of `pseudoreal ui`, against an API server that answers as the test says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pseudoreal import Client
from pseudoreal_client.ui import table as table_module
from pseudoreal_client.ui.cluster import cluster_jobs
from pseudoreal_client.ui.table import JobTable, TableFeed
from pseudoreal_trainer.cli.common import ClusterOptions
from pseudoreal_trainer.ui.view import Row

from tests.support.jobs import good_job
from tests.support.patience import wait_for
from tests.unit.client.support.scripted_server import Answer, ScriptedServer, failure, one, scripted_server, watch

Json = dict[str, Any]
WATCH, LIST = "watch=true", "pseudorealjobs"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(table_module, "_LEAST_PAUSE_SECONDS", 0.01)
    with scripted_server() as running:
        yield running


@pytest.fixture
def kubeconfig(server: ScriptedServer, tmp_path: Path) -> str:
    return server.kubeconfig(tmp_path / "config")


def stored(name: str, version: int, **status: Any) -> Json:
    body = good_job(name)
    body["metadata"] |= {"namespace": "team", "uid": name, "resourceVersion": str(version)}
    body["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
    return body | {"status": {"state": "Training"} | status}


def listed(version: int, *bodies: Json, following: str = "") -> Answer:
    return one({"metadata": {"resourceVersion": str(version), "continue": following}, "items": [*bodies]})


@pytest.fixture
def table(kubeconfig: str) -> Callable[..., tuple[JobTable, list[str]]]:
    """Function that starts a table; returns it with the ids that it tells of."""

    def start() -> tuple[JobTable, list[str]]:
        told: list[str] = []
        return JobTable(Client(kubeconfig=kubeconfig).api, "team", told.append), told

    return start


Start = Callable[[], tuple[JobTable, list[str]]]


def states(table: JobTable) -> dict[str, str]:
    return {row.name: row.state for row in table.listing().rows}


def await_states(table: JobTable, **wanted: str) -> None:
    wait_for(str(wanted), lambda: states(table) == wanted, lambda: str(table.listing()), pause=0.01)


def test_rows_follow_the_changes_of_the_watch(server: ScriptedServer, table: Start) -> None:
    server.answers = {
        WATCH: [
            watch(
                ("ADDED", stored("b", 3)),
                ("BOOKMARK", {"metadata": {"resourceVersion": "4"}}),
                ("MODIFIED", stored("a", 5, state="Failed")),
                ("DELETED", stored("c", 6)),
                silent=True,
            )
        ],
        LIST: [listed(2, stored("a", 1), stored("c", 2))],
    }
    found, told = table()
    await_states(found, a="Failed", b="Training")
    assert {*told} == {"team/a", "team/b", "team/c"}
    assert server.watches() == ["2"], "from the version of the list"
    assert ("team/a" in found, "team/c" in found, "team/x" in found) == (True, False, False)


def test_pages_of_a_list_are_one_list(server: ScriptedServer, table: Start) -> None:
    server.answers = {
        WATCH: [watch(silent=True)],
        "continue=more": [listed(2, stored("b", 1))],
        LIST: [listed(2, stored("a", 1), following="more")],
    }
    await_states(table()[0], a="Training", b="Training")


def test_missed_changes_are_made_up_by_another_list(server: ScriptedServer, table: Start) -> None:
    """The watch is too old (410); meanwhile one job is gone, one is new and one has changed."""
    server.answers = {
        WATCH: [one(failure(410, "Expired"), 410), watch(silent=True)],
        LIST: [listed(2, stored("a", 1), stored("b", 2)), listed(9, stored("b", 8, state="Complete"), stored("c", 9))],
    }
    found, told = table()
    await_states(found, b="Complete", c="Training")
    # The rows are those of the list; the thread asks for the watch after it has told of them.
    wait_for("a watch from the second list on", lambda: server.watches() == ["2", "9"], server.watches, pause=0.01)
    assert {*told} == {"team/a", "team/b", "team/c"}


def test_a_watch_that_is_cut_goes_on_from_its_last_change(server: ScriptedServer, table: Start) -> None:
    server.answers = {
        WATCH: [watch(("ADDED", stored("b", 7)), cut=True), watch(("ADDED", stored("c", 8)), silent=True)],
        LIST: [listed(2, stored("a", 1))],
    }
    found, _ = table()
    await_states(found, a="Training", b="Training", c="Training")
    assert server.watches() == ["2", "7"]
    wait_for("nothing is said any more", lambda: not found.listing().notices)


def test_a_refusal_is_said_until_it_is_lifted(server: ScriptedServer, table: Start) -> None:
    forbidden = one(failure(403, "Forbidden", "you cannot list"), 403)
    server.answers = {WATCH: [watch(silent=True)], LIST: [forbidden, forbidden, listed(2, stored("a", 1))]}
    found, _ = table()
    said = wait_for("a sentence", lambda: found.listing().notices, pause=0.001)
    assert "you cannot list" in said[0]
    await_states(found, a="Training")
    wait_for("nothing is said any more", lambda: not found.listing().notices)


def test_jobs_of_other_releases_and_too_large_ones_have_a_row(server: ScriptedServer, table: Start) -> None:
    later = stored("later", 1)
    later["status"] = {"state": ["x"]}
    server.answers = {
        WATCH: [watch(silent=True)],
        LIST: [listed(2, later, {"metadata": stored("large", 2)["metadata"]})],
    }
    found, _ = table()
    await_states(found, later="Unreadable", large="Unreadable")
    notes = {row.name: row.note for row in found.listing().rows}
    assert "state" in notes["later"]
    assert "too large" in notes["large"]


def test_no_more_jobs_are_kept_than_the_bound(
    server: ScriptedServer, table: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "MOST_JOBS", 3)
    server.answers = {
        WATCH: [watch(("ADDED", stored("x", 8)), ("MODIFIED", stored("a", 9, state="Failed")), silent=True)],
        LIST: [listed(2, *(stored(name, 1) for name in "abcdef"), following="more")],
    }
    found, _ = table()
    await_states(found, a="Failed", b="Training", c="Training")
    assert found.listing().notices == ["Only 3 jobs are listed; choose a namespace with -n."]
    assert len([each for each in server.asked if "watch" not in each]) == 1, "no further page is asked for"


def test_an_unchanged_table_is_no_news(server: ScriptedServer, table: Start) -> None:
    server.answers = {WATCH: [watch(silent=True)], LIST: [listed(2, stored("a", 1))]}
    found, _ = table()
    await_states(found, a="Training")
    feed = TableFeed(found)
    first = feed.read()
    assert first is not None
    assert [row.id for row in first.rows] == ["team/a"]
    wait_for("no more news", lambda: feed.read() is None)


def test_only_names_that_the_api_server_has_sent_are_asked_for(server: ScriptedServer, kubeconfig: str) -> None:
    """A path in the page's address must not become a path of the API server."""
    server.answers = {WATCH: [watch(silent=True)], LIST: [listed(2, stored("a", 1))]}
    source = cluster_jobs(ClusterOptions("team", None, kubeconfig), everywhere=False)
    assert source.job("team/a") is None, "before the list has been read"
    feed = source.listing()
    wait_for("the list", lambda: source.job("team/a") is not None)
    asked = len(server.asked)
    for id in ("team/b", "team/../../api/v1/secrets", "other/a", "team/", "a", ""):
        assert source.job(id) is None
    assert len(server.asked) == asked
    feed.close()


def test_a_row_has_what_get_shows(server: ScriptedServer, table: Start) -> None:
    progress: Json = {"step": 15, "totalSteps": 20, "percent": 75, "tokens": 1, "loss": "3.25"}
    progress["lastUpdatedTime"] = "2030-01-01T00:00:00Z"
    body = stored("a", 1, currentPhase="real", restarts=2, progress=progress)
    server.answers = {WATCH: [watch(silent=True)], LIST: [listed(2, body)]}
    found, _ = table()
    await_states(found, a="Training")
    expected = Row("team/a", "a", "team", "Training", "real", "15 of 20 (75%)", "3.25", "2", "2030-01-01 00:00:00")
    assert [*found.listing().rows] == [expected]
