"""Learning rate of each step, end of the phase, and the steps that measure gradients of single layers. Pure."""

from dataclasses import dataclass
from itertools import repeat
from math import ceil, cos, pi

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_api.spec.phase import GradientCorrelation

from pseudoreal_trainer.checkpoint.manifest import Ending, Measurement
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients
from pseudoreal_trainer.training.progress import Progress


def phase_rate(config: PhaseConfig, step: int, begin: int) -> float:
    """Return the learning rate of step `step`, including the warm-up of a phase started at step `begin`."""
    rate = learning_rate(config.optimizer, step, config.total_steps)
    return rate * min(1.0, (step - begin) / config.warmup_steps) if config.warmup_steps else rate


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (the first is 1): linear warm-up to the peak, then decay to
    `final_fraction` of the peak."""
    peak, warmup = float(optimizer.learning_rate), optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    final = float(optimizer.final_fraction)
    return peak * (final + (1.0 - final) * _remaining_decay(optimizer, step - warmup, max(1, total_steps - warmup)))


def _remaining_decay(optimizer: Optimizer, done: int, steps: int) -> float:
    """Return the remaining share of the decay, from 1 to 0, after `done` of the `steps` steps that follow the
    warm-up."""
    progress = min(1.0, done / steps)
    match optimizer.schedule:
        case "Constant":
            return 1.0
        case "Linear":
            return 1.0 - progress
        case "Cosine":
            return (1.0 + cos(pi * progress)) / 2
        case "WarmupStableDecay":
            return min(1.0, (1.0 - progress) / float(optimizer.decay_fraction))


@dataclass(frozen=True)
class EndConditions:
    """End conditions of a phase, and the steps that it measures.

    No method changes `progress`: the training loop stores the results in it.
    """

    config: PhaseConfig

    def is_over(self, progress: Progress) -> bool:
        return progress.step >= self._last_step(progress)

    def measures(self, progress: Progress) -> bool:
        """Return whether the next step is one of the last `measure.steps` steps; the delink uses their gradients."""
        measure = self.config.measure
        return measure is not None and progress.step >= self._last_step(progress) - measure.steps

    def checks(self, progress: Progress) -> bool:
        """Return whether the next step compares the gradients of neighbouring layers."""
        rule = self.config.until.gradient_correlation
        return rule is not None and (progress.step + 1) % rule.every_steps == 0

    def after_loss(self, progress: Progress) -> Ending:
        """Return the phase's `Ending`, given the validation loss just measured after this step."""
        loss, reached = self.config.until.validation_loss, progress.validation_loss
        # Written with `not`, so that a NaN loss does not count as having reached the bound.
        if loss is None or reached is None or not reached <= float(loss):
            return progress.ending
        return self._end_soon(progress, progress.ending.checks)

    def after_request(self, progress: Progress) -> Ending:
        """Return the phase's `Ending` after a request to finish the phase."""
        return self._end_soon(progress, progress.ending.checks)

    def after_check(self, progress: Progress, correlations: tuple[float, ...]) -> Ending:
        """Return the phase's `Ending` after the newest step's gradient comparison. A check that is not met resets the
        count of checks."""
        rule = self.config.until.gradient_correlation
        assert rule is not None, "`checks` is True only in a phase with `until.gradientCorrelation`"
        checks = progress.ending.checks + 1 if is_met(rule, correlations) else 0
        if checks < rule.checks:
            return Ending(checks=checks, step=progress.ending.step)
        return self._end_soon(progress, checks)

    def after_measuring(self, progress: Progress, found: LayerGradients) -> Measurement:
        """Return the phase's measurement so far with the newest step added."""
        assert self.config.measure is not None, "`measures` is True only in a phase with `measure`"
        sharing = self.config.measure.next_sharing
        before = progress.measurement or Measurement(next_sharing=sharing, steps=0, shared={}, single={})
        return Measurement(
            next_sharing=before.next_sharing,
            steps=before.steps + 1,
            shared=_add(before.shared, found.shared),
            single=_add(before.single, found.single),
        )

    def _last_step(self, progress: Progress) -> int:
        tokens, last = self.config.until.tokens, self.config.phase_steps
        if tokens is not None:
            per_step = self.config.batch.sequences * self.config.model.sequence_length
            last = min(last, progress.step + max(0, ceil((tokens - progress.tokens) / per_step)))
        return last if progress.ending.step is None else min(last, progress.ending.step)

    def _end_soon(self, progress: Progress, checks: int) -> Ending:
        """Return an `Ending` with this step as the end step; in a phase that measures gradients, with the step after
        `measure.steps` more steps. An end step set earlier is kept."""
        measured = 0 if self.config.measure is None or progress.step == 0 else self.config.measure.steps
        step = progress.step + measured if progress.ending.step is None else progress.ending.step
        return Ending(checks=checks, step=step)


def is_met(rule: GradientCorrelation, correlations: tuple[float, ...]) -> bool:
    """Return whether more than half of the correlations are below the bound.

    The rule is from arXiv 2110.03848 ("SWE-A"). There, the bound is 0.5, and three checks, 1,000 steps apart, must be
    met.
    """
    below = sum(correlation < float(rule.below) for correlation in correlations)
    return 2 * below > len(correlations)


def _add(left: dict[str, list[float]], right: dict[str, list[float]]) -> dict[str, list[float]]:
    return {
        name: [one + other for one, other in zip(left.get(name, repeat(0.0)), values, strict=False)]
        for name, values in right.items()
    }
