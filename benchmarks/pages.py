"""Pages of tables below docs/benchmarks/. Each section of a page is written by the program that measures it."""

import re
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

CLAIMS = Path("docs/benchmarks.md")
"""Page of the claims, written by `benchmarks.claims`."""
PAGES = Path("docs/benchmarks")
IMAGES = Path("docs/images")
STEPS, PREDICTIONS, CHECKPOINTS, GPU, OPERATOR, DATA, MIXTURES = (
    PAGES / f"{name}.md" for name in ("steps", "predictions", "checkpoints", "gpu", "operator", "data", "mixtures")
)


def put_section(page: Path, text: str) -> None:
    """Replace the page's section that has the same title, or append the section. `text` starts with the title."""
    page.write_text(with_section(page.read_text(), text))
    progress.note(f"wrote {page}")


def with_section(document: str, text: str) -> str:
    """Return the document with `text` in place of the section with the same title, or appended. `text` starts with the
    title."""
    title = re.escape(text.partition("\n")[0])
    pattern = re.compile(rf"^{title}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(document) is None:
        return f"{document.rstrip()}\n\n{text}\n"
    return pattern.sub(lambda _: f"{text}\n\n", document).rstrip() + "\n"


def picture(description: str, name: str) -> str:
    """Return the Markdown of a picture in `IMAGES`, for a page."""
    return f"![{description}](../images/{name})"
