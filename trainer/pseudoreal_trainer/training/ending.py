"""Which steps of a phase measure the gradients of single layers, and when a phase ends. Pure."""

from dataclasses import dataclass
from itertools import repeat
from math import ceil

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import GradientCorrelation

from pseudoreal_trainer.checkpoint.manifest import Ending, Measurement
from pseudoreal_trainer.engine.probe import LayerGradients
from pseudoreal_trainer.training.progress import Progress


@dataclass(frozen=True)
class Rules:
    """When a phase ends, as its spec says. Nothing here changes the progress: the loop puts the results into it."""

    config: PhaseConfig

    def is_over(self, progress: Progress) -> bool:
        return progress.step >= self._last_step(progress)

    def measures(self, progress: Progress) -> bool:
        """Whether the next step is one of the last, which the delink wants measured."""
        measure = self.config.measure
        return measure is not None and progress.step >= self._last_step(progress) - measure.steps

    def checks(self, progress: Progress) -> bool:
        """Whether the next step compares the gradients of neighbouring layers."""
        rule = self.config.until.gradient_correlation
        return rule is not None and (progress.step + 1) % rule.every_steps == 0

    def after_loss(self, progress: Progress) -> Ending:
        """The end of the phase, now that the validation loss of this step is known."""
        loss, reached = self.config.until.validation_loss, progress.validation_loss
        # A loss that is no number has not reached the bound either.
        if loss is None or reached is None or not reached <= float(loss):
            return progress.ending
        return self._ending_soon(progress, progress.ending.checks)

    def after_request(self, progress: Progress) -> Ending:
        """The end of the phase, now that somebody has asked for it."""
        return self._ending_soon(progress, progress.ending.checks)

    def after_check(self, progress: Progress, correlations: tuple[float, ...]) -> Ending:
        """The end of the phase, now that the gradients of the newest step are compared."""
        rule = self.config.until.gradient_correlation
        assert rule is not None, "only a phase with this rule checks"
        checks = progress.ending.checks + 1 if is_met(rule, correlations) else 0
        if checks < rule.checks:
            return Ending(checks=checks, step=progress.ending.step)
        return self._ending_soon(progress, checks)

    def after_measuring(self, progress: Progress, found: LayerGradients) -> Measurement:
        """All that the phase has measured so far, with the newest step."""
        assert self.config.measure is not None, "only then a step is measured"
        sharing = self.config.measure.next_sharing
        before = progress.measurement or Measurement(next_sharing=sharing, steps=0, shared={}, single={})
        return Measurement(
            next_sharing=before.next_sharing,
            steps=before.steps + 1,
            shared=_added(before.shared, found.shared),
            single=_added(before.single, found.single),
        )

    def _last_step(self, progress: Progress) -> int:
        tokens, last = self.config.until.tokens, self.config.phase_steps
        if tokens is not None:
            per_step = self.config.batch.sequences * self.config.model.sequence_length
            last = min(last, progress.step + max(0, ceil((tokens - progress.tokens) / per_step)))
        return last if progress.ending.step is None else min(last, progress.ending.step)

    def _ending_soon(self, progress: Progress, checks: int) -> Ending:
        """The end at this step, or after the steps that are still to be measured. An end that is known already
        stays."""
        measured = 0 if self.config.measure is None or progress.step == 0 else self.config.measure.steps
        step = progress.step + measured if progress.ending.step is None else progress.ending.step
        return Ending(checks=checks, step=step)


def is_met(rule: GradientCorrelation, correlations: tuple[float, ...]) -> bool:
    """Whether more than half of the neighbours differ: the rule of arXiv 2110.03848 ("SWE-A"), there with 0.5 in three
    checks that lie 1,000 steps apart."""
    below = sum(correlation < float(rule.below) for correlation in correlations)
    return 2 * below > len(correlations)


def _added(left: dict[str, list[float]], right: dict[str, list[float]]) -> dict[str, list[float]]:
    return {
        name: [one + other for one, other in zip(left.get(name, repeat(0.0)), values, strict=False)]
        for name, values in right.items()
    }
