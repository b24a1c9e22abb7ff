"""Extension of griffe: examples in docstrings, which begin with `>>>`, become code in the site.

mkdocstrings reads docstrings as Markdown, in which `>>>` quotes a quotation.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):  # type: ignore[misc]
    """Rewrites every docstring by `fenced`, before mkdocstrings renders the docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Return the docstring with a fence around each example. An example ends before an empty line."""
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)
