"""Claims are computed from raw results, and README's figures are theirs and not old."""

from pathlib import Path

import pytest
from pseudoreal_dev.machine import version

from benchmarks.claims import Claim, Record, outdated, page, read
from benchmarks.pages import CLAIMS, PAGES, with_section

CLAIM = Claim(
    subject="A step",
    page="steps.md",
    against="torch 2.15.0",
    result=("faster in 2 of 3 comparisons",),
    loses=("slower in 1 of 3 comparisons",),
    misses=("the error is 30%; the aim is at most 20%",),
    measured="2026-11-26, at 0123abc, 2 cores",
    release="0.4.0.dev0",
    in_readme="2 of 3 comparisons",
)


def test_the_page_of_claims_is_written_from_the_record() -> None:
    assert page(read()) == CLAIMS.read_text()


def test_each_claim_names_a_page_of_tables() -> None:
    assert {claim.page for claim in read().claims} <= {file.name for file in PAGES.iterdir()}


def test_figures_in_readme_are_those_of_claims_and_not_older_than_a_release() -> None:
    assert outdated(read().claims, Path("README.md").read_text(), str(version.read())) == []


@pytest.mark.parametrize("release", ["0.4.0.dev0", "0.4.1", "0.5.0"])
def test_a_figure_of_this_release_or_the_one_before_is_not_outdated(release: str) -> None:
    assert outdated([CLAIM], "It is faster in 2 of 3\ncomparisons.", release) == []


@pytest.mark.parametrize("release", ["0.6.0.dev0", "1.0.0"])
def test_an_older_figure_in_readme_is_named(release: str) -> None:
    [sentence] = outdated([CLAIM], "faster in 2 of 3 comparisons", release)
    assert "'2 of 3 comparisons'" in sentence
    assert "0.4.0.dev0" in sentence


def test_a_figure_that_readme_lacks_is_named() -> None:
    [sentence] = outdated([CLAIM], "faster in 3 of 3 comparisons", "0.4.0")
    assert "lacks '2 of 3 comparisons'" in sentence


def test_a_claim_that_readme_does_not_name_may_be_old() -> None:
    assert outdated([CLAIM.model_copy(update={"in_readme": ""})], "", "9.0.0") == []


def test_a_new_claim_takes_the_place_of_the_old_one_about_the_same_subject() -> None:
    other = CLAIM.model_copy(update={"subject": "A save"})
    new = CLAIM.model_copy(update={"loses": ()})
    assert Record(claims=[CLAIM, other]).with_claims([new]).claims == [new, other]


def test_a_claim_shows_results_losses_missed_aims_and_where_it_was_measured() -> None:
    text = page(Record(claims=[CLAIM]))
    assert "## [A step](benchmarks/steps.md)" in text
    assert "- Faster in 2 of 3 comparisons." in text
    assert "- **Loses**: slower in 1 of 3 comparisons." in text
    assert "- **Misses an aim**: the error is 30%; the aim is at most 20%." in text
    assert "Release 0.4.0.dev0 of pseudoreal was measured on 2026-11-26, at 0123abc, 2 cores." in text
    assert "It was compared with torch 2.15.0." in text
    assert "†" not in text


def test_the_name_of_the_project_stays_lower_case() -> None:
    text = page(Record(claims=[CLAIM.model_copy(update={"result": ("pseudoreal is fast",)})]))
    assert "- pseudoreal is fast." in text


def test_copied_figures_are_marked_and_explained() -> None:
    text = page(Record(claims=[CLAIM.model_copy(update={"is_copied": True})]))
    assert "Release 0.4.0.dev0 † of pseudoreal" in text
    assert "A † after the release" in text


def test_a_section_replaces_the_section_of_the_same_title_alone() -> None:
    document = "# Page\n\n## One\n\nold\n\n## Two\n\nkept\n"
    assert with_section(document, "## One\n\nnew") == "# Page\n\n## One\n\nnew\n\n## Two\n\nkept\n"
    assert with_section(document, "## Three\n\nnew").endswith("kept\n\n## Three\n\nnew\n")
