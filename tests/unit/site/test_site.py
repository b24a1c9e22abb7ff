"""The built site: it needs no network, shows documents as GitHub does, and its search works from a disk."""

import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from pseudoreal_dev.machine.paths import REPOSITORY

DOCUMENTS = REPOSITORY / "docs"
HOST = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
LOADED = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
}
"""Element -> attributes whose URL a browser loads without a click."""
COUNTED = {"li": "list_item_open", "tr": "tr_open", "pre": "fence", "blockquote": "blockquote_open"}
"""Element of a page -> token of markdown-it that makes it."""


class _Elements(HTMLParser):
    """Elements of a page with their attributes, and the number of each below the article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.in_article: Counter[str] = Counter()
        self._is_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._is_article = self._is_article or tag == "article"
        if self._is_article:
            self.in_article[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._is_article = self._is_article and tag != "article"


def loads_from_hosts(text: str) -> list[str]:
    """Return the URLs with a host that a page loads by itself."""
    elements = _Elements(text).found
    urls = [attributes.get(name) or "" for tag, attributes in elements for name in LOADED.get(tag, ())]
    urls += re.findall(r"url\(\s*[\"']?([^\"')]+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
    return [url for url in urls if HOST.match(url.strip())]


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(pages) > 60
    assert {str(page): found for page in pages if (found := loads_from_hosts(page.read_text()))} == {}


def test_no_page_has_a_diagram_whose_program_would_be_loaded(site: Path) -> None:
    assert [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text()] == []


def test_flowchart_of_the_rooms_is_shown_as_tables_with_the_same_arrows(site: Path) -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    lines = text.partition("flowchart LR\n")[2].partition("```")[0].splitlines()
    arrows = [line for line in lines if line.strip() != "end" and "subgraph" not in line]
    page = (site / "repository/CONTRIBUTING.html").read_text()
    assert "flowchart LR" not in page
    tables = [part.partition("</table>")[0] for part in page.split("<table>") if "<th>imports</th>" in part]
    cells = re.findall(r"<td>([^<]*)</td>", "".join(tables))
    assert len(cells) == 2 * len(arrows) > 80
    assert sum(bool(cell) + cell.count(",") for cell in cells[1::2]) == sum(
        line.count("-->") + line.count("&") for line in arrows
    )


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/iframe-worker/shim"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "<style>@import 'https://a.example/x.css';</style>",
        "body{background:url(http://a.example/x.png)}",
        '<img srcset="https://a.example/x.png 2x">',
    ],
)
def test_what_loads_from_a_host_is_noticed(text: str) -> None:
    assert loads_from_hosts(text)


@pytest.mark.parametrize("document", sorted(DOCUMENTS.rglob("*.md")), ids=lambda path: path.stem)
def test_page_has_the_lists_tables_and_blocks_of_its_document(site: Path, document: Path) -> None:
    """Python-Markdown reads lists in another way than CommonMark, which GitHub shows."""
    text = document.read_text()
    if "\n::: " in text:
        pytest.skip("docstrings are inserted into this page")
    tokens = Counter(token.type for token in MarkdownIt("commonmark").enable("table").parse(text))
    place = document.relative_to(DOCUMENTS).with_suffix(".html")
    page = site / (place.with_name("index.html") if document.stem == "README" else place)
    shown = _Elements(page.read_text()).in_article
    expected = {tag: tokens[token] for tag, token in COUNTED.items()}
    assert {tag: shown[tag] for tag in COUNTED} == expected


def test_licence_of_the_script_for_search_is_in_the_notice() -> None:
    folder = REPOSITORY / "dev/pseudoreal_dev/site"
    assert (folder / "iframe-worker-LICENSE").read_text().strip() in (REPOSITORY / "NOTICE").read_text()


def test_navigation_has_four_kinds() -> None:
    text = re.sub(r"!ENV \[.*\]", "''", (REPOSITORY / "mkdocs.yml").read_text())
    names = [next(iter(entry)) for entry in yaml.safe_load(text)["nav"]]
    assert names == ["Home", "Tutorials", "How-to", "Reference", "Explanation"]


@pytest.fixture
def program() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no chromium in PATH; on Debian, apt-get install chromium")
    return found


@pytest.mark.browser
def test_search_works_from_a_disk_without_a_request_to_a_host(site: Path, program: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # The sandbox needs rights that a container lacks; the pages are this test's own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.fill("input.md-search__input", "PseudoRealOperatorAbsent")
        page.wait_for_selector(".md-search-result__link", timeout=120_000)
        found = page.locator(".md-search-result__link").first.get_attribute("href")
        browser.close()
    assert found is not None
    assert "runbooks.html" in found
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
