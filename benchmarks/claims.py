"""The claims of docs/benchmarks.md: how this project compares with others, and where it loses.

Each benchmark computes its claims from its raw results and puts them into docs/data/claims.json; docs/benchmarks.md is
written from that file alone.
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from textwrap import fill

from packaging.version import Version
from pydantic import BaseModel

from benchmarks.pages import CLAIMS, PAGES
from benchmarks.results import RESULTS

RECORD = RESULTS / "claims.json"
OLDEST = 1
"""Minor releases by which a figure in README may be older than the code."""


class Claim(BaseModel, frozen=True):
    subject: str
    """Title of the claim; a page makes one claim about a subject."""
    page: str
    """Name of the page of tables, such as steps.md."""
    against: str
    """Compared programs with their versions; empty if the claim is about this project alone."""
    result: tuple[str, ...]
    loses: tuple[str, ...]
    """Comparisons that this project loses."""
    misses: tuple[str, ...] = ()
    """Aims that this project misses."""
    measured: str
    """Date, commit and machine."""
    release: str
    """Version of this project at the commit."""
    in_readme: str = ""
    """Words with the claim's figures that README repeats; empty: README does not name the claim."""
    is_copied: bool = False
    """True if the figures were copied from tables whose raw results were not kept."""


class Record(BaseModel):
    claims: list[Claim] = []

    def with_claims(self, claims: Sequence[Claim]) -> "Record":
        """Return the record with these claims, in the order of the record, in place of those about the same subject of
        the same page."""
        found = {(claim.page, claim.subject): claim for claim in [*self.claims, *claims]}
        return Record(claims=[*found.values()])


def put(*claims: Claim) -> None:
    """Record the claims, and write the page."""
    found = read().with_claims(claims)
    RECORD.write_text(found.model_dump_json(indent=1) + "\n")
    CLAIMS.write_text(page(found))


def read(path: Path = RECORD) -> Record:
    return Record.model_validate_json(path.read_bytes()) if path.exists() else Record()


def page(record: Record) -> str:
    parts = [_HEAD, *map(_section, record.claims)]
    if any(claim.is_copied for claim in record.claims):
        parts.append(_COPIED)
    return "\n\n".join(parts) + "\n"


_HEAD = """# Benchmarks

Each section sums up a page of tables; the heading of the section links to that page. The programs of the benchmarks
compute all figures, and write this page and the pages of tables. All figures were measured on two CPU cores with small
models, except in the section about a GPU. A factor is the speed of pseudoreal divided by the speed of the compared
program. If a factor is below 1, pseudoreal is slower. A name in italics is the name of a row or a column in the tables.
**Loses** marks a comparison in which pseudoreal is worse than the compared program. **Misses an aim** marks a figure
that does not reach an aim of this project. A plus after a commit means that the measured working tree had changes that
the commit lacks. [Does pseudo-to-real training pay?](method.md) compares the losses of models that were trained in
different ways."""
_COPIED = """\
A † after the release of a section means that the raw results of this section were not kept. The figures of the
section were copied from its tables."""


def _section(claim: Claim) -> str:
    items = [f"- {_capitalized(result)}." for result in claim.result]
    items += [f"- **Loses**: {loss}." for loss in claim.loses]
    items += [f"- **Misses an aim**: {miss}." for miss in claim.misses]
    lines = [fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items]
    against = f" It was compared with {claim.against}." if claim.against else ""
    mark = " †" if claim.is_copied else ""
    measured = f"Release {claim.release}{mark} of pseudoreal was measured on {claim.measured}.{against}"
    return f"## [{claim.subject}]({PAGES.name}/{claim.page})\n\n" + "\n".join(lines) + f"\n\n{fill(measured, 120)}"


def _capitalized(sentence: str) -> str:
    """Return the sentence with a capital at its start, except in the project's name."""
    return sentence if sentence.startswith("pseudoreal") else sentence[0].upper() + sentence[1:]


def outdated(claims: Sequence[Claim], readme: str, release: str) -> list[str]:
    """Return a sentence for each figure that README lacks, or that was measured more than `OLDEST` minor releases
    before `release`."""
    found = []
    words = " ".join(readme.split())
    for claim in (claim for claim in claims if claim.in_readme):
        if claim.in_readme not in words:
            found.append(f"README lacks {claim.in_readme!r}, the figure of {claim.subject!r}")
        if _minors_between(Version(claim.release), Version(release)) > OLDEST:
            found.append(
                f"README says {claim.in_readme!r}, measured with release {claim.release}; measure {claim.subject!r}"
                f" again with release {release}"
            )
    return found


def _minors_between(older: Version, newer: Version) -> float:
    """Return the minor releases from one to the other; infinity if the major releases differ."""
    return newer.minor - older.minor if newer.major == older.major else inf
