"""docs/method.md, the evidence for advice and the pictures, from whole, partial and no results."""

import re
from pathlib import Path

import pytest

from benchmarks.method import pictures, report, tables
from benchmarks.method.analysis import comparisons, leading, trials
from benchmarks.method.arms import ARMS, BUDGETS, EARLY_BUDGETS, REGISTERED, Study
from benchmarks.method.evidence import evidence
from benchmarks.method.law import Fit, Law
from benchmarks.method.marks import Mark, planned
from benchmarks.method.report import document, write_report
from benchmarks.method.results import Result
from benchmarks.method.trend import Trend, samples_of, trend
from tests.unit.benchmarks.method.support.samples import HIGHEST, LOWEST, RATE, WIDTH, curve, rates, result, row

MARKS = [Mark("dense", "a machine", 5.2, "measured", "a source"), Mark("dense", "another", 0.8, "predicted", "a plan")]
OFFSETS = {"unshared": 0.0, "delinked at 30 %": 0.1, "grown from 4 layers at 30 %": -0.1, "shared throughout": 0.15}


def results(seeds: int, study: Study = "dense") -> list[Result]:
    """Return four arms: one slower, one faster, one shared throughout. Seeds differ by whole nats and 0.001."""
    return [
        *rates(study),
        *(
            one
            for name, offset in OFFSETS.items()
            for seed in range(seeds)
            for one in curve(study, name, seed, [loss + seed + offset * (1 + seed / 100) for loss in (3.4, 3.2, 3.0)])
        ),
    ]


def cells(text: str, start: str, column: int) -> list[str]:
    """Return a column of the table rows that begin with a cell."""
    return [line.split(" | ")[column] for line in text.splitlines() if line.startswith(f"| {start} |")]


class TestAnswers:
    def test_the_first_sentences_answer_for_each_kind_of_arm(self) -> None:
        """At ratio 4 sharing throughout, 0.15 above, is read on the curve of unshared training, and marked."""
        text = document(results(3), MARKS)
        assert (
            "\n- **Dense: no. At each cost ratio from 1 to 20, each delinked arm is slower than unshared training or"
            " than a control.**\n" in text
        )
        _, ratio, delinked, grown, shared = next(
            row for row in text.splitlines() if row.startswith("| dense | 4")
        ).split(" | ")
        assert ratio == "4"
        assert re.fullmatch(r"\*delinked at 30 %\*: 1\.1\d \([^)]*\)†", delinked)
        assert re.fullmatch(r"\*grown from 4 layers at 30 %\*: 1\.50 \([^)]*\)", grown)
        assert re.fullmatch(r"\*shared throughout\*: 3\.2\d \([^)]*\)† \|", shared)

    def test_each_arm_has_its_verdict_and_its_seeds(self) -> None:
        text = document(results(3), MARKS)
        verdicts = {name: cells(text, name, 3)[0] for name in OFFSETS if name != "unshared"}
        assert verdicts == {"delinked at 30 %": "no", "grown from 4 layers at 30 %": "yes", "shared throughout": "no"}
        assert cells(text, "shared throughout", 1)[0] == "3"

    def test_only_arms_that_end_above_unshared_training_are_marked(self) -> None:
        text = document(results(3), MARKS)
        assert cells(text, "delinked at 30 %", 2)[0].endswith(")†")
        assert cells(text, "grown from 4 layers at 30 %", 2)[0].endswith(")")

    def test_numbers_are_those_of_the_results(self) -> None:
        text = document(results(3), MARKS)
        assert cells(text, "delinked at 30 %", 4)[0].startswith("+0.1010 (+0.0985 to +0.1035)")
        # 0.101 above: unshared training has the loss just over halfway, in logarithms, between 1 and 0.75. Budgets are
        # whole steps, so their ratio differs from 0.75 a little.
        speed_up = float(cells(text, "delinked at 30 %", 2)[0].partition(" (")[0])
        assert speed_up == pytest.approx(0.75**0.505, abs=0.006)

    def test_one_seed_has_no_interval(self) -> None:
        text = document(results(1), MARKS)
        assert (
            "- One seed, no interval: *shared throughout*, *delinked at 30 %*, *grown from 4 layers at 30 %*." in text
        )
        assert cells(text, "grown from 4 layers at 30 %", 3)[0] == "open"
        assert cells(text, "delinked at 30 %", 2)[0] == "0.87 (one seed)†"

    def test_missing_controls_are_named(self) -> None:
        text = document(results(3), MARKS)
        assert "Controls that are not trained: *4 blocks throughout*, *grown from 1 layer at 50 %*." in text

    def test_a_delinked_arm_that_wins_is_named_with_its_ratios(self) -> None:
        wins = [
            one if one.arm != "delinked at 30 %" else one.model_copy(update={"loss": one.loss - 0.4})
            for one in results(3)
        ]
        text = document(wins, MARKS)
        assert re.search(
            r"Dense: yes\. Faster than unshared training, grown arms and arms shared throughout: \*delinked at 30 %\*"
            r" at cost ratios 1 to",
            text,
        )

    def test_a_bound_is_said(self) -> None:
        far = [
            one if one.arm != "shared throughout" else one.model_copy(update={"loss": one.loss + 3})
            for one in results(3)
        ]
        assert cells(document(far, MARKS), "shared throughout", 2)[0] == "at most 0.50†"

    def test_an_undecided_delinked_arm_is_open_and_not_below(self) -> None:
        text = document(results(1), MARKS)
        assert "**Dense: no delinked arm is shown to be faster than unshared training and all controls" in text
        assert " The verdict is open for *delinked at 30 %* at cost ratios 1 to 20.**" in text

    def test_without_a_delinked_arm_seconds_are_open(self) -> None:
        text = document([one for one in results(3) if one.role == "tuning" or "delinked" not in one.arm], MARKS)
        assert "- **Dense: open. No delinked arm and unshared training have a seed in common yet.**" in text

    def test_answers_are_provisional_while_seeds_are_missing(self) -> None:
        """The plan has 5 seeds of primary arms and 3 of the others at the size that has all arms."""
        text = document(results(3), MARKS)
        provisional = next(line for line in text.splitlines() if line.startswith("- **Provisional**"))
        assert "*delinked at 30 %* 3 of 5" in provisional
        assert "*4 blocks, delinked at 30 %* 0 of 5" in provisional
        assert "*small model* 0 of 3" in provisional
        assert "*shared throughout*" not in provisional
        plan = [(one.name, 5 if one.is_primary else 3) for one in ARMS["dense"]]
        whole = [row for name, seeds in plan for seed in range(seeds) for row in curve("dense", name, seed, (3, 2, 1))]
        assert "Provisional" not in document([*rates("dense"), *whole], MARKS)


class TestRemedies:
    NOISE, RESET = "delinked at 30 %, noise", "delinked at 30 %, Reset"

    def test_remedies_are_held_against_their_base_and_unshared_training(self) -> None:
        """Seeds are whole nats apart, and differences vary by a thousandth with the seed."""
        tried = {self.NOISE: -0.02, self.RESET: 0.02}
        rows = [
            one
            for name, offset in tried.items()
            for seed in range(3)
            for one in curve("dense", name, seed, [9, 9, 3.1 + offset + seed * 1.002])
        ]
        text = document([*results(3), *rows], MARKS).partition("## What else was tried")[2].partition("\n## ")[0]
        assert f"\n- 1 arm has a lower loss than its base: *{self.NOISE}*.\n" in text
        assert f"\n- 1 arm has a higher loss than its base: *{self.RESET}*.\n" in text
        assert "\n- No arm has a lower loss than unshared training.\n" in text
        assert f"\n- 2 arms have a higher loss than unshared training: *{self.NOISE}*, *{self.RESET}*.\n" in text
        noise, reset = (line for line in text.splitlines() if line.startswith("| dense |"))
        assert noise.startswith(f"| dense | {self.NOISE} | delinked at 30 % | 4.0820 | −0.0190 (")
        assert "| +0.1220 (" in reset
        assert reset.endswith("| 3 |")

    def test_remedies_that_are_not_trained_are_named(self) -> None:
        text = document(results(3), MARKS)
        assert "None of them is trained yet." in text
        assert f"| dense | {WIDTH} | {self.NOISE} | seed 0, seed 1, seed 2 |" in text

    def test_trials_without_remedies_do_not_speak_of_them(self) -> None:
        gpu = [one.model_copy(update={"width": 768}) for one in results(1)]
        assert "What else was tried" not in document(gpu, MARKS)


class TestPartialData:
    def test_without_results_all_is_open_and_nothing_is_trained(self) -> None:
        text = document([], [])
        assert "**Open: no arm and unshared training are trained with a seed in common yet.**" in text
        assert "No rate is tried yet." in text
        assert "images/" not in text
        assert text.count("its peak rate is not chosen yet") == sum(map(len, ARMS.values()))

    def test_without_unshared_training_losses_are_shown_alone(self) -> None:
        text = document([one for one in results(3) if one.role == "tuning" or one.arm != "unshared"], MARKS)
        assert "**Open:" in text
        assert cells(text, "delinked at 30 %", 3)[0].strip() == "4.1010"
        assert evidence(trials(results(3)[:0])) == {"trials": []}

    def test_what_is_missing_is_the_plan_minus_what_is_trained(self) -> None:
        """Growth: 5 seeds in the plan, of which 3 are here; of seed 1 one budget is lost."""
        grown = "grown from 4 layers at 30 %"
        rows = [one for one in results(3) if (one.arm, one.seed, one.budget) != (grown, 1, BUDGETS[1])]
        text = document(rows, MARKS)
        assert f"| dense | {WIDTH} | {grown} | seed 1 at 75 %, seed 3, seed 4 |" in text
        assert f"| dense | {WIDTH} | shared throughout |" not in text.partition("## Not trained")[2]
        assert "| experts | all | unshared | its peak rate is not chosen yet |" in text

    def test_of_a_rates_choice_the_rates_are_named_that_are_not_tried(self) -> None:
        text = tables.not_trained(rates("dense", {LOWEST: 4.2, RATE: 4.0}))
        assert f"| dense | {WIDTH} | unshared | rate {HIGHEST:g}, budget 50 % |" in text
        tried = ", ".join(f"rate {rate:g}, budget 50 %" for rate in (LOWEST, RATE, HIGHEST))
        assert f"| experts | {WIDTH} | unshared | {tried} |" in text

    def test_early_budgets_of_unshared_training_stand_in_the_table_of_losses(self) -> None:
        early = [row("dense", "unshared", 0, budget, 3.5 - budget) for budget in EARLY_BUDGETS]
        text = document([*results(1), *early], MARKS).partition("## Losses")[2]
        assert cells(text, "arm", 1)[0] == f"{100 * EARLY_BUDGETS[0]:.0f} % of the tokens"
        assert cells(text, "unshared", 1)[0] == f"{3.5 - EARLY_BUDGETS[0]:.4f}"
        assert cells(text, "delinked at 30 %", 1)[0] == "–"

    def test_the_page_of_rates_alone_needs_no_pictures_and_no_plans(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(report, "marks", lambda: pytest.fail("plans take half a minute, and nothing shows them"))
        write_report(rates("dense")[:2], tmp_path / "page.md", tmp_path / "evidence.json")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["evidence.json", "page.md"]

    def test_whole_budgets_on_other_parts_of_the_text_are_a_limit(self) -> None:
        same, other = (
            results(3),
            [one.model_copy(update={"validation_tokens": 60_000}) if one.budget == 0.5 else one for one in results(3)],
        )
        assert "different parts of the validation text" not in document(same, MARKS)
        assert "different parts of the validation text" in document(other, MARKS)

    def test_a_diverged_run_is_named(self) -> None:
        rows = [*results(3), *curve("dense", "delinked at 50 %", 0, (3.4, 3.2, float("nan")))]
        where = f"dense, width {WIDTH}, delinked at 50 %, seed 0, rate {RATE:g}"
        assert f"- Diverged, and left out: {where}." in document(rows, MARKS)

    def test_a_run_far_above_the_others_is_named_and_counts(self) -> None:
        """Seeds are whole nats apart in these rows, so all of one seed."""
        rows = [*results(1), *curve("dense", "delinked at 50 %", 0, (3.4, 3.2, 4.5))]
        text = document(rows, MARKS)
        assert (
            f"nat above the median of their size and budget, and not left out: dense, width {WIDTH}, delinked at 50"
            in text
        )
        assert cells(text, "delinked at 50 %", len((*EARLY_BUDGETS, *BUDGETS)))[1].strip() == "4.5000"
        assert "above the median" not in document(results(1), MARKS)


def test_every_tried_rate_is_shown_and_the_chosen_one_is_bold() -> None:
    tried = {LOWEST: 4.2, RATE: 4.0, HIGHEST: float("nan")}
    full = [
        result("dense", "tuning", "unshared", 100, 1.0, loss, WIDTH, rate)
        for rate, loss in {RATE: 3.9, LOWEST: 3.8, LOWEST / 2: 3.95}.items()
    ]
    text = tables.rates([*rates("dense", tried), *full])
    assert f"| dense | {WIDTH} | unshared | 50 % |  | 4.2000 | 4.0000 | diverged | {LOWEST:g} |" in text
    assert f"| dense | {WIDTH} | unshared | 100 % | 3.9500 | **3.8000** | 3.9000 |  | {LOWEST:g} |" in text


def test_rates_at_the_edge_are_not_chosen() -> None:
    text = tables.rates(rates("dense", {LOWEST: 4.2, RATE: 4.1, HIGHEST: 4.0}))
    assert f"| dense | {WIDTH} | unshared | 50 % | 4.2000 | 4.1000 | 4.0000 | not finished |" in text


def test_phi_is_held_against_the_published_value() -> None:
    law, found = Law(1.8, 0.6, 0.35, 0.5, 0.4, 0.3), trials(results(1))
    inside = tables.fit(Fit(law, 0.2, 0.5, 15, 0.001), found)
    assert (
        "φ = 0.30 (95 % interval 0.20 to 0.50). The literature has φ = 0.46; the interval of the fit contains" in inside
    )
    assert "the interval of the fit does not contain this value" in tables.fit(Fit(law, 0.2, 0.4, 15, 0.001), found)
    assert "it cannot be said whether the two values differ" in tables.fit(Fit(law, None, None, 15, 0.001), found)
    assert re.search(r"\| 1 \| 0 % \| 0 % \| 0 %: 1\.00, 30 %: 0\.\d\d \| 0 %: 1\.00, 30 %: 0\.87 \|", inside)


class TestEvidence:
    def test_a_trial_has_its_stages_and_estimates(self) -> None:
        found = {one["arm"]: one for one in evidence(trials(results(3)))["trials"]}
        assert set(found) == set(OFFSETS) - {"unshared"}
        one = found["delinked at 30 %"]
        # 12 layers of 4 H² in attention and 8 H² in the MLP.
        assert (one["study"], one["width"], one["parameters"]) == ("dense", WIDTH, 12 * 12 * WIDTH**2)
        assert one["tokens"] == max(row.tokens for row in results(3) if row.role == "compared")
        assert one["seeds"] == 3
        assert one["stages"] == [
            {"until": 0.3, "layers": 12, "blocks": 1, "sharesExperts": False, "experts": None},
            {"until": 1, "layers": 12, "blocks": 12, "sharesExperts": False, "experts": None},
        ]
        assert one["lossDifference"]["mean"] == pytest.approx(0.101)
        assert one["lossDifference"]["low"] < 0.101 < one["lossDifference"]["high"]
        assert 0.8 < one["speedUpInTokens"]["low"] < one["speedUpInTokens"]["mean"] < 0.9

    def test_one_seed_has_null_ends(self) -> None:
        one = evidence(trials(results(1)))["trials"][0]
        assert (one["speedUpInTokens"]["low"], one["lossDifference"]["high"]) == (None, None)


class TestPictures:
    def test_the_deciding_picture_names_arms_and_marks_on_the_axis(self, tmp_path: Path) -> None:
        compared = leading(comparisons(trials(results(3))))
        first, second = tmp_path / "first" / "a.svg", tmp_path / "second" / "a.svg"
        for path in (first, second):
            pictures.draw_decision(compared, MARKS, path)
        text = first.read_text()
        assert text == second.read_text()
        for name in ("delinked at 30 %", "shared throughout", "a machine (measured, 5.2)"):
            assert name in text
        assert "another" not in text

    def test_a_line_of_one_seed_says_so(self, tmp_path: Path) -> None:
        pictures.draw_decision(leading(comparisons(trials(results(1)))), MARKS, tmp_path / "a.svg")
        assert "delinked at 30 %† (one seed)" in (tmp_path / "a.svg").read_text()
        pictures.draw_decision(leading(comparisons(trials(results(2)))), MARKS, tmp_path / "a.svg")
        assert "one seed" not in (tmp_path / "a.svg").read_text()

    def test_curves_and_trends_name_their_arms(self, tmp_path: Path) -> None:
        other = next(size.width for size in REGISTERED.sizes["dense"] if size.width != WIDTH)
        rows = [*results(2), *(one.model_copy(update={"width": other}) for one in results(2))]
        found = trials(rows)
        pictures.draw_curves(found, tmp_path / "curves.svg")
        line = trend(samples_of(found, "delinked at 30 %"))
        assert isinstance(line, Trend)
        pictures.draw_trends({"dense": {"delinked at 30 %": line}}, tmp_path / "trend.svg")
        assert "grown from 4 layers at 30 %" in (tmp_path / "curves.svg").read_text()
        assert "delinked at 30 %" in (tmp_path / "trend.svg").read_text()


def test_a_planned_mark_is_the_ratio_that_stands_in_the_example() -> None:
    text = Path("examples/gpu/124m-pseudo-one-gpu.yaml").read_text()
    stated = re.search(r"A step of real takes ([\d.]+) times as long as one of pseudo", text)
    assert stated is not None
    found = planned("dense", "one GPU", "gpu/124m-pseudo-one-gpu", "gpu-machine")
    assert found.ratio == pytest.approx(float(stated[1]), abs=0.005)
    assert found.origin == "predicted"


def test_the_speed_up_in_the_readme_is_that_of_the_page() -> None:
    text = Path("README.md").read_text()
    [readme] = re.findall(r"ordinary training needs (\d\.\d+ \([^)]*\)) times as many operations", text)
    page = Path("docs/method.md").read_text()
    speed_ups = page[page.index(": speed-ups\n") :]
    assert cells(speed_ups, "grown from 4 layers at 30 %", 3)[0] == readme
    [of_experts] = re.findall(r"ordinary training needs (\d\.\d+ \([^)]*\)) times as many seconds", text)
    fastest = next(row for row in page.splitlines() if row.startswith("| experts | 4 |")).split(" | ")[2]
    assert fastest.rstrip("†") == f"*experts delinked at 50 %*: {of_experts}"
