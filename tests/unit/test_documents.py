"""What the documents name exists: links and their headings, files, commands of make and pseudoreal, fields of a job
with their values."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pseudoreal_api.base import API_VERSION
from pseudoreal_trainer.cli.command import SECTIONS

from tests.support.documents import FENCE, ROOT, folders, prose, spans

Json = dict[str, Any]

DOCUMENTS = sorted(
    file for pattern in ("*.md", "docs/**/*.md", "operator/*.md", ".github/*.md") for file in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)+\.(py|md|yaml|svg|sh|json|tpl)")
_FIELD = re.compile(r"(?:spec\.)?([a-z]\w*(?:\[\])?(?:\.[a-zA-Z]\w*(?:\[\])?)+)")
_OPEN = "x-kubernetes-preserve-unknown-fields"
"""Marks an object whose fields Kubernetes defines."""
_HISTORY = ("CHANGELOG.md", "docs/decisions/")
"""Documents that speak of what was: they may name what is gone."""


def test_the_readme_is_one_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 1000
    assert len(re.findall(r"!\[", text)) == 1


def test_the_readme_has_the_commands_that_ci_runs() -> None:
    commands = re.findall(r"^make [\w-]+", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert commands
    for command in (*commands, "make demo", "make run"):
        assert command in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/layouts.md", "docs/engine.md"])
def test_where_the_default_order_is_explained_the_patent_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert re.search(r"\bLayered\b", text)
    assert "12,585,929" in text


def test_every_document_is_linked_from_another() -> None:
    linked = {(path.parent / link.partition("#")[0]).resolve() for path in DOCUMENTS for link in _links(path)}
    alone = {path for path in ROOT.glob("docs/*.md") if path not in linked}
    assert not alone


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
class TestADocument:
    def test_its_links_lead_somewhere(self, path: Path) -> None:
        for link in _links(path):
            name, _, heading = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not heading or heading in _headings(target), link

    def test_the_files_that_it_names_exist(self, path: Path) -> None:
        for name in _named_files(path):
            assert any(found for folder in folders(path) for found in folder.glob(name)), name

    def test_the_commands_that_it_names_exist(self, path: Path) -> None:
        text = path.read_text()
        for target in re.findall(r"(?:`|^ *|IMAGE=… )make ([a-z][a-z0-9-]*)", text, re.MULTILINE):
            assert target in _targets(), target
        for command in re.findall(r"(?:`|bin/)pseudoreal ([a-z][a-z-]+)", text, re.MULTILINE):
            assert command in _commands() or command == "checkpoint", command  # a name in manifests
        for module in re.findall(r"python -m ([a-z_]+\.[a-z_.]+\w)", text):
            assert find_spec(module) is not None, module

    def test_the_fields_that_it_names_exist(self, path: Path) -> None:
        for field in _fields(path):
            assert _exists(field.replace("[]", "").split(".")), field

    def test_the_jobs_that_it_shows_fit_the_schema(self, path: Path) -> None:
        """Whole jobs, and parts of a spec or of a phase, in blocks and in code spans with a value."""
        for part in [] if _is_history(path) else _parts(path):
            assert [*_misfits(part)] == []


def _is_history(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(_HISTORY)


def _links(path: Path) -> Iterator[str]:
    """The links of a document, except those that leave the repository."""
    return (link for link in _LINK.findall(prose(path)) if "://" not in link)


def _headings(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _named_files(path: Path) -> Iterator[str]:
    """Files in code spans, without those of a checkpoint or of a machine."""
    for span in [] if _is_history(path) else spans(path):
        if _FILE.fullmatch(span) and not span.startswith("."):
            yield span


@cache
def _targets() -> set[str]:
    lines = re.findall(r"^([a-z0-9 -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target for line in lines for target in line.split()}


def _commands() -> set[str]:
    return {name for section in SECTIONS.values() for name in section}


@cache
def _schema() -> Any:
    body = yaml.safe_load((ROOT / "crds/pseudoreal.dev_pseudorealjobs.yaml").read_text())
    return body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def _roots() -> list[Any]:
    """Where a dotted name may begin: in the spec, in a phase, in the whole object."""
    spec = _schema()["properties"]["spec"]
    return [_schema(), spec, spec["properties"]["phases"]["items"]]


def _fields(path: Path) -> Iterator[str]:
    """Dotted names in code spans whose first part is one of the spec, of a phase or of the status."""
    for span in [] if _is_history(path) else spans(path):
        match = _FIELD.fullmatch(span.split(":")[0].split("=")[0].strip())
        if match and Path(span).suffix not in (".py", ".md", ".yaml", ".json"):
            first = match[1].split(".")[0].removesuffix("[]")
            if any(first in root["properties"] for root in _roots()) and first != "metadata":
                yield match[1]


def _parts(path: Path) -> Iterator[Json]:
    """What the document shows of jobs, as nested objects."""
    for language, block in FENCE.findall(path.read_text()):
        for body in yaml.safe_load_all(block) if language == "yaml" else ():
            yield from body if isinstance(body, list) else [body]
    for span in spans(path):
        match = re.fullmatch(r"(?:spec\.)?([a-z]\w*(?:\.[a-z]\w*)*): (\S.*)", span)
        if match:
            value = yaml.safe_load(match[2])
            for name in reversed(match[1].split(".")):
                value = {name: value}
            yield value


def _misfits(part: Json) -> Iterator[str]:
    """Fields and values that no job has."""
    if part.get("apiVersion", API_VERSION) != API_VERSION:
        return
    if "kind" in part:
        yield from _below(_schema(), part, "")
        return
    for name, value in part.items():
        schemas = [root["properties"][name] for root in _roots() if name in root["properties"]]
        misfits = [[*_below(schema, value, name)] for schema in schemas]
        if misfits and all(misfits):
            yield from misfits[0]


def _below(schema: Any, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _below(schema.get("items", {}), item, f"{path}[]")
    elif isinstance(value, dict):
        fields = schema.get("properties", {})
        if path != ".metadata" and "additionalProperties" not in schema and _OPEN not in schema:
            yield from (f"{path}.{name}" for name in value if name not in fields)
        for name, child in value.items():
            yield from _below(fields.get(name, {_OPEN: True}), child, f"{path}.{name}")
    elif "properties" in schema or ("enum" in schema and value not in schema["enum"]):
        yield f"{path}: {value}"


def _exists(names: list[str]) -> bool:
    return any(_leads(root, names) for root in _roots())


def _leads(schema: Any, names: list[str]) -> bool:
    """Whether the names lead through the schema; what is below an object without listed fields is not looked at."""
    schema = schema.get("items", schema)
    if not names or "properties" not in schema or _OPEN in schema:
        return True
    return names[0] in schema["properties"] and _leads(schema["properties"][names[0]], names[1:])


@pytest.mark.parametrize("kind", ["Job", "Pod"])
def test_manifests_of_pods_in_the_documents_follow_kubernetes(kind: str) -> None:
    blocks = FENCE.findall((ROOT / "docs" / "gpus.md").read_text())
    bodies = [body for language, block in blocks if language == "yaml" for body in yaml.safe_load_all(block)]
    (found,) = [body for body in bodies if body.get("kind") == kind]
    kubernetes_validate.validate(found, "1.37", strict=True)
