"""Work of whole trials, and the full budget that fits a time. Pure."""

from dataclasses import dataclass, replace

from benchmarks.method.arms import Scale, Study, full_steps, parameters
from benchmarks.method.schedule import expected, real_steps, unfinished


@dataclass(frozen=True)
class Work:
    links: int
    steps: float
    """In steps of the real phase."""

    def seconds(self, step: float, link: float = 0.0) -> float:
        """Return the seconds of the work, one link at a time. `step`, `link`: seconds of a real step, and of the start
        and end of a link."""
        return self.links * link + self.steps * step


def work_of(scale: Scale) -> Work:
    """Return the work of all trainings from the start, with one rate more than the first ones to be tried."""
    links = unfinished(expected([], scale), []).values()
    return Work(len(links), sum(map(real_steps, links)))


def with_tokens(scale: Scale, study: Study, tokens: int) -> Scale:
    """Return the scale with this full budget of the study."""
    return replace(scale, tokens_per_parameter=tokens / parameters(study, scale.tuned_width))


def tokens_within(scale: Scale, study: Study, seconds: float, step: float, link: float) -> int:
    """Return the tokens of the full budget with which all trainings take so many seconds; 0 if their starts alone take
    longer."""
    work, width = work_of(scale), scale.tuned_width
    steps = max(0.0, seconds - work.links * link) / step
    return int(steps / work.steps * full_steps(study, width, scale)) * scale.tokens_of_a_step
