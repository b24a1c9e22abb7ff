"""Results of planned runs, without training."""

from benchmarks.method.results import Result
from benchmarks.method.schedule import Planned


def results_of(one: Planned, loss: float, device: str = "cpu") -> list[Result]:
    """Return a row for each budget."""
    run = one.run
    return [
        Result(
            study=run.study,
            role=one.role,
            width=run.width,
            arm=run.arm.name,
            seed=run.seed,
            rate=run.rate,
            budget=budget * run.fraction,
            steps=decay.end,
            tokens=decay.end * run.scale.tokens_of_a_step,
            loss=loss,
            validation_tokens=1,
            seconds_per_step=1.0,
            peak_bytes=1,
            date="2026-11-26",
            commit="abc",
            device=device,
        )
        for budget, decay in one.decays()
    ]
