"""Which steps of a phase measure the gradients of single layers, and when a phase ends. Pure."""

from dataclasses import dataclass
from math import ceil

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import GradientCorrelation

from pseudoreal_trainer.checkpoint.manifest import Ending, Manifest, Measurement
from pseudoreal_trainer.engine.probe import LayerGradients


@dataclass(frozen=True)
class Rules:
    """Of a phase's end."""

    config: PhaseConfig

    def is_over(self, state: Manifest) -> bool:
        return state.step >= self._last_step(state)

    def measures(self, state: Manifest) -> bool:
        """The next step is one of the last, which the delink asks for."""
        measure = self.config.measure
        return measure is not None and state.step >= self._last_step(state) - measure.steps

    def checks(self, state: Manifest) -> bool:
        """The next step compares the gradients of neighbouring layers."""
        rule = self.config.until.gradient_correlation
        return rule is not None and (state.step + 1) % rule.every_steps == 0

    def after_loss(self, state: Manifest) -> Manifest:
        """The state once its validation loss is known."""
        loss, reached = self.config.until.loss, state.validation_loss
        # Also a loss that is no number has not been reached.
        if loss is None or reached is None or not reached <= float(loss):
            return state
        return self._ending_soon(state)

    def after_request(self, state: Manifest) -> Manifest:
        """The state once somebody has asked for the end of the phase."""
        return self._ending_soon(state)

    def after_check(self, state: Manifest, correlations: tuple[float, ...]) -> Manifest:
        """The state once the gradients of its step are compared."""
        rule = self.config.until.gradient_correlation
        assert rule is not None, "only a phase with this rule checks"
        ending = state.ending
        checks = ending.checks + 1 if is_met(rule, correlations) else 0
        state = state.model_copy(update={"ending": ending.model_copy(update={"checks": checks})})
        return self._ending_soon(state) if checks >= rule.checks else state

    def after_measuring(self, state: Manifest, found: LayerGradients) -> Manifest:
        assert self.config.measure is not None, "only then it is measured"
        before = state.measurement or Measurement(
            next_sharing=self.config.measure.next_sharing, steps=0, shared={}, single={}
        )
        measurement = before.model_copy(
            update={
                "steps": before.steps + 1,
                "shared": _added(before.shared, found.shared),
                "single": _added(before.single, found.single),
            }
        )
        return state.model_copy(update={"measurement": measurement})

    def _last_step(self, state: Manifest) -> int:
        tokens, last = self.config.until.tokens, self.config.phase_steps
        if tokens is not None:
            per_step = self.config.batch.sequences * self.config.model.sequence
            last = min(last, state.step + max(0, ceil((tokens - state.tokens) / per_step)))
        return last if state.ending.step is None else min(last, state.ending.step)

    def _ending_soon(self, state: Manifest) -> Manifest:
        """It ends now, or after the steps that still measure."""
        if state.ending.step is not None:
            return state
        step = state.step + (0 if self.config.measure is None or state.step == 0 else self.config.measure.steps)
        return state.model_copy(update={"ending": Ending(checks=state.ending.checks, step=step)})


def is_met(rule: GradientCorrelation, correlations: tuple[float, ...]) -> bool:
    """More than half of the neighbours differ: the rule of arXiv 2110.03848 ("SWE-A"), there with 0.5 in three checks
    that lie 1,000 steps apart."""
    below = sum(correlation < float(rule.below) for correlation in correlations)
    return 2 * below > len(correlations)


def _added(left: dict[str, float], right: dict[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + value for name, value in right.items()}
