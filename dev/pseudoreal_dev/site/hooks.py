"""Hooks of MkDocs for `make site`: the documents as GitHub shows them, and the files of the repository that they name.

MkDocs loads this file in an environment that has MkDocs and none of this project's packages. The site has a page for
each document in docs/, and one below `repository/` for each file elsewhere that a document links to: a document as it
is, a folder as a list of its files, other texts as code.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_HERE = Path(__file__).parent
_DOCUMENTS = PurePosixPath("docs")
_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
_ITEM = re.compile(r"(?P<indent> *)(?P<marker>[-*+]|\d{1,9}[.)])(?P<space> +)(?=\S)")
_FLOWCHART = re.compile(r"^```mermaid\nflowchart LR\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NODE = re.compile(r"(\w+)\[([^\]]+)\]")
"""Identifier and label of a node."""
_MOST_BYTES = 100_000
"""Maximum size of a file that gets a page; a larger one is copied as it is."""
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "sh",
    ".tpl": "yaml",
    ".lua": "lua",
    ".txt": "text",
}
"""Suffix of a file -> the language that colours its page; other files are copied as they are."""
_GENERATED = {"corpus", "__pycache__"}
"""Folders that a list of files leaves out."""


@dataclass
class _Repository:
    """The files of the repository that the site shows. Paths are relative to the repository."""

    root: Path
    places: dict[PurePosixPath, str] = field(default_factory=dict)
    """Path of a file or folder -> its place in the site."""

    def path_of(self, source: str) -> PurePosixPath | None:
        """Return the path of the document at a place in the site; None for a page that no document is."""
        if source.startswith("repository/"):
            return next((path for path, place in self.places.items() if place == source), None)
        return _DOCUMENTS / source

    def place_of(self, path: PurePosixPath) -> str | None:
        """Return the place in the site of a file or folder; None if the repository has no such file."""
        if path.is_relative_to(_DOCUMENTS):
            return str(path.relative_to(_DOCUMENTS))
        if path in self.places:
            return self.places[path]
        file = self.root / path
        # A link that leaves the repository would publish a file of the machine.
        if not file.exists() or not file.resolve().is_relative_to(self.root.resolve()):
            return None
        # MkDocs leaves out names that begin with a dot.
        base = "repository/" + "/".join(part.removeprefix(".") for part in path.parts)
        if file.is_dir():
            return f"{base}/index.md"
        is_document = path.suffix == ".md"
        is_page = path.suffix == ".ipynb" or (path.suffix in _LANGUAGES and file.stat().st_size <= _MOST_BYTES)
        return base if is_document or not is_page else f"{base}.md"


_repository = _Repository(Path())


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that GitHub gives them, and name all pages of a folder in the navigation."""
    global _repository
    _repository = _Repository(Path(config.config_file_path).parent)
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda title, _separator: anchor(title)
    config.nav = _with_folders(config.nav or [], Path(config.docs_dir))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a document links to, our style, and the script for search offline."""
    open_documents = [_DOCUMENTS / file.src_uri for file in files.documentation_pages()]
    while open_documents:
        document = open_documents.pop()
        for path in _targets(document):
            place = _repository.place_of(path)
            if path.is_relative_to(_DOCUMENTS) or place is None or path in _repository.places:
                continue
            _repository.places[path] = place
            if files.get_file_from_path(place) is None:
                files.append(_file(path, place, config))
            if path.suffix == ".md" or place.endswith("/index.md"):
                open_documents.append(path)
    for place in ("assets/javascripts/iframe-worker.js", "assets/stylesheets/site.css"):
        files.append(File.generated(config, place, abs_src_path=str(_HERE / Path(place).name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point links to the places of the site, and indent lists as MkDocs reads them."""
    path = _repository.path_of(page.file.src_uri)
    if path is None:
        return markdown
    start = PurePosixPath(page.file.src_uri).parent
    return with_deep_lists(with_links(with_tables_of_arrows(markdown), lambda link: _moved(link, path, start)))


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def with_links(markdown: str, moved: Callable[[str], str]) -> str:
    """Return the text with each link outside fences replaced."""
    lines, fence = [], ""
    for line in markdown.splitlines():
        fence = _after(line, fence)
        lines.append(line if fence else _LINK.sub(lambda match: moved(match[0]), line))
    return "\n".join(lines) + "\n"


def with_tables_of_arrows(markdown: str) -> str:
    """Return the text with each flowchart of Mermaid replaced by a table for each subgraph: a node, and the nodes that
    its arrows point to.

    The program that draws Mermaid would be loaded from a network; GitHub has it, and shows the flowchart.
    """
    return _FLOWCHART.sub(lambda match: _tables_of_arrows(match[1]), markdown)


def _tables_of_arrows(flowchart: str) -> str:
    labels = dict(_NODE.findall(flowchart))
    tables: dict[str, list[str]] = {}  # heading -> rows; arrows outside of all subgraphs are between packages
    heading = "package"
    for line in map(str.strip, flowchart.splitlines()):
        if line.startswith("subgraph "):
            heading = f"room of {line.removeprefix('subgraph ')}"
        elif line == "end":
            heading = "package"
        else:
            source, *targets = (_NODE.sub(r"\1", name) for name in re.split(" --> | & ", line))
            cells = (labels.get(source, source), ", ".join(labels.get(name, name) for name in targets))
            tables.setdefault(heading, []).append(f"| {cells[0]} | {cells[1]} |")
    return "\n".join(
        line
        for heading, rows in tables.items()
        for line in ("", f"| {heading} | imports |", "| --- | --- |", *rows, "")
    )


def with_deep_lists(markdown: str) -> str:
    """Return the text with the lists of CommonMark written for Python-Markdown.

    CommonMark indents the content of an item by the width of its marker, and lets a list follow a paragraph at once.
    Python-Markdown asks for four columns a level, and for an empty line before a list.
    """
    lines: list[str] = []
    levels: list[int] = []  # columns at which the contents of the open items begin
    has_parts = False  # whether an open item has an empty line, and so several paragraphs or blocks
    fence = ""
    for line in markdown.splitlines():
        if not line.strip():
            lines.append("")
            has_parts = has_parts or bool(levels)
            continue
        indent = len(line) - len(line.lstrip())
        item = None if fence else _ITEM.match(line)
        follows_text = bool(lines) and bool(lines[-1].strip())
        # A line that continues a paragraph may stand further left than the item that it belongs to.
        if item or not (fence or follows_text):
            is_inside = bool(levels)
            while levels and indent < levels[-1]:
                levels.pop()
            if item and follows_text and (has_parts or not is_inside):
                lines.append("")
            has_parts = has_parts and bool(levels)
        base = levels[-1] if levels else 0
        lines.append(" " * (4 * len(levels) + max(indent - base, 0)) + line.lstrip())
        if item:
            levels.append(item.end())
        fence = _after(line, fence)
    return "\n".join(lines) + "\n"


def _after(line: str, fence: str) -> str:
    """Return the mark of the fence that is open after a line; empty outside fences."""
    found = _FENCE.match(line)
    if not found:
        return fence
    if not fence:
        return found[1]
    return "" if found[1] == fence else fence


def _with_folders(entries: list[Any], documents: Path) -> list[Any]:
    """Return the navigation with each entry `folder/*` replaced by the pages of the folder, but its README."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append(
                {title: _with_folders(x, documents) if isinstance(x, list) else x for title, x in entry.items()}
            )
        elif entry.endswith("/*"):
            files = sorted(documents.glob(f"{entry}.md"))
            found.extend(file.relative_to(documents).as_posix() for file in files if file.stem != "README")
        else:
            found.append(entry)
    return found


def _moved(link: str, path: PurePosixPath, start: PurePosixPath) -> str:
    name, mark, heading = link.partition("#")
    if not name or "://" in name or name.startswith("mailto:"):
        return link
    place = _repository.place_of(_resolved(path, name))
    return link if place is None else os.path.relpath(place, start) + mark + heading


def _targets(document: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield what a document links to in the repository; of a folder, its files."""
    file = _repository.root / document
    if file.is_dir():
        yield from (document / entry.name for entry in _entries(file))
        return
    found: list[str] = []
    with_links(file.read_text(), lambda link: found.append(link) or link)  # type: ignore[func-returns-value]
    for link in found:
        name = link.partition("#")[0]
        if name and "://" not in name and not name.startswith("mailto:"):
            yield _resolved(document, name)


def _resolved(document: PurePosixPath, name: str) -> PurePosixPath:
    """Return the path that a link of a document leads to: of a folder with a README, that document."""
    path = PurePosixPath(os.path.normpath(document.parent / name))
    readme = path / "README.md"
    return readme if (_repository.root / readme).exists() else path


def _entries(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.name[0] != "." and entry.name not in _GENERATED)


def _file(path: PurePosixPath, place: str, config: MkDocsConfig) -> File:
    source = _repository.root / path
    if path.suffix == ".md" or not place.endswith(".md"):
        return File.generated(config, place, abs_src_path=str(source))
    if source.is_dir():
        content = "".join(f"- [{entry.name}]({entry.name})\n" for entry in _entries(source))
        # The links are relative to the list's own page, which is one level deeper than the folder.
        content = content.replace("](", f"]({path.name}/")
    elif path.suffix == ".ipynb":
        content = _notebook(source.read_text())
    else:
        content = f"````{_LANGUAGES[path.suffix]}\n{source.read_text()}````\n"
    is_searched = path.is_relative_to("examples")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: {str(not is_searched).lower()}\n---\n\n# `{path}`\n\n"
    return File.generated(config, place, content=head + content)


def _notebook(text: str) -> str:
    """Return the cells of a notebook as a document; outputs are left out."""
    cells = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        cells.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(cells) + "\n"
