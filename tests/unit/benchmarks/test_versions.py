"""The table of two versions: medians of the timed steps of all rounds, and their ratio."""

from benchmarks.versions_results import VersionCase, VersionPair, VersionSteps

CASE = VersionCase(model="tiny", home="Host", micro_batches=4, mixed=True)


def steps(*seconds: float) -> VersionSteps:
    return VersionSteps(warm_up=1, seconds=list(seconds), waited=[s / 10 for s in seconds], losses=[1.0])


def test_the_speedup_is_of_medians_over_the_timed_steps_of_all_rounds() -> None:
    pair = VersionPair(case=CASE, base=[steps(99.0, 3.0, 3.0), steps(99.0, 1.0)], new=[steps(99.0, 2.0)])
    assert pair.speedup == 1.5
    assert pair.milliseconds("base", "waited") == 300.0
    assert pair.case.label == "tiny, Host, n = 4, bfloat16, clipped"
