"""Pages that programs write are up to date, and pages that list names of the code lack none."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pseudoreal_dev.machine.paths import REPOSITORY
from pseudoreal_operator.status.events import Reason

from tests import commands, outputs, sizing
from tests.support.documents import FENCE, spans

DOCUMENTS = REPOSITORY / "docs"
OPERATOR = REPOSITORY / "operator/pseudoreal_operator"
RUNBOOKS = DOCUMENTS / "runbooks.md"
NEW = [
    *(DOCUMENTS / f"{name}.md" for name in ("index", "why", "sizing", "runbooks", "reasons", "commands", "python-api")),
    *sorted((DOCUMENTS / "tutorials").glob("*.md")),
]
"""Pages whose lines have at most 120 characters."""


def test_page_of_the_commands_is_up_to_date() -> None:
    assert commands.PAGE.read_text() == commands.page(), "run `python -m tests.commands`"


@pytest.mark.parametrize("name", [pytest.param("10t", marks=pytest.mark.long), "1b", "7b", "70b"])
def test_table_of_sizes_is_up_to_date(name: str) -> None:
    text = sizing.PAGE.read_text()
    start = text.index(f"<!-- {name}: written by")
    part = text[start : text.index(f"<!-- end of {name}", start) + 12]
    assert sizing.with_tables(part) == part, "run `python -m tests.sizing`"


@pytest.mark.parametrize("page", outputs.PAGES, ids=lambda page: page.stem)
def test_outputs_in_a_tutorial_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert "written by python -m tests.outputs" in text
    assert outputs.with_outputs(text) == text, "run `python -m tests.outputs`"


def _alerts() -> dict[str, str]:
    """Return the runbook of each alert."""
    groups = yaml.safe_load((REPOSITORY / "charts/pseudoreal/files/alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["annotations"]["runbook"] for group in groups for rule in group["rules"]}


def test_each_alert_names_its_section_of_the_runbooks() -> None:
    sections = re.findall(r"^### (.+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert _alerts() == {name: f"docs/runbooks.md#{name.lower()}" for name in sections}


def test_lines_of_the_log_in_the_runbooks_are_written_by_the_operator() -> None:
    source = "".join(file.read_text() for file in OPERATOR.rglob("*.py"))
    named = {span for span in spans(RUNBOOKS) if re.fullmatch("[a-z]+(_[a-z]+)+", span)}
    lines = {name for name in named if not name.startswith(("pseudoreal_", "runbook_"))}
    assert {"task_died", "pass_failed"} <= lines
    assert {name for name in lines if f'"{name}"' not in source} == set()


def _announced() -> Iterator[str]:
    """Yield the reasons that the operator gives to the condition Progressing, where the code writes them out."""
    for file in OPERATOR.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                first = node.args[0]
                is_reason = node.func.id in ("progressing", "not_progressing", "Announcement", "Blocker", "_Clock")
                if is_reason and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def test_page_of_the_reasons_has_all_of_them() -> None:
    named = {*spans(DOCUMENTS / "reasons.md")}
    announced = {*_announced()}
    assert len(announced) > 20
    assert {*announced, *map(str, Reason)} - named == set()


@pytest.mark.parametrize("page", NEW, ids=lambda page: page.stem)
def test_lines_of_a_new_page_are_short(page: Path) -> None:
    """Rows of tables, outputs and pictures cannot be wrapped."""
    lines = FENCE.sub("", page.read_text()).splitlines()
    assert [line for line in lines if len(line) > 120 and line.lstrip()[:1] not in ("|", "!")] == []
