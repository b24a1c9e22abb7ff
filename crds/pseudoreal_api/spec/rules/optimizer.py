"""Rules on the optimizer, and on tensors with settings of their own."""

from pseudoreal_api.spec.rules.rule import on_job

_LACKS = (
    "((m.tensors == 'Head' && self.model.embeddings == 'Tied')"
    " || (m.tensors in ['Experts', 'Router'] && !has(self.model.experts))"
    " || (m.tensors == 'FeedForward' && has(self.model.experts) && size(self.model.experts.denseLayers) == 0))"
)
_NEVER_DECAYS = "(m.tensors in ['Norms', 'Biases'] && double(m.weightDecay) != 1.0)"

OPTIMIZER_RULES = (
    on_job(
        "double(self.optimizer.learningRate) > 0.0",
        "spec.optimizer.learningRate %s must be greater than 0",
        "self.optimizer.learningRate",
    ),
    on_job(
        "double(self.optimizer.finalFraction) <= 1.0",
        "spec.optimizer.finalFraction %s must be at most 1",
        "self.optimizer.finalFraction",
    ),
    on_job(
        "double(self.optimizer.decayFraction) > 0.0 && double(self.optimizer.decayFraction) <= 1.0",
        "spec.optimizer.decayFraction %s must be greater than 0 and at most 1",
        "self.optimizer.decayFraction",
    ),
    on_job(
        "double(self.optimizer.beta1) < 1.0 && double(self.optimizer.beta2) < 1.0",
        "spec.optimizer.beta1 %s and spec.optimizer.beta2 %s must be less than 1",
        "self.optimizer.beta1",
        "self.optimizer.beta2",
    ),
    on_job(
        # The smallest normal float32 is 1.18e-38; numbers far below it become zero.
        "double(self.optimizer.epsilon) >= 1e-37",
        "spec.optimizer.epsilon %s must be at least 1e-37: in float32 it would be 0, and a parameter without a gradient"
        " would be divided by that",
        "self.optimizer.epsilon",
    ),
    on_job(
        "self.model.embeddings != 'Tied' || !('Head' in self.optimizer.decayExclusions)",
        "spec.optimizer.decayExclusions has Head, but with spec.model.embeddings %s there is no head of its own; write"
        " Embedding for the one matrix",
        "self.model.embeddings",
    ),
    on_job(
        f"self.optimizer.multipliers.all(m, !{_LACKS})",
        "spec.optimizer.multipliers[%s]: spec.model has none of these tensors; remove it. A tied head is the Embedding",
        f"self.optimizer.multipliers.filter(m, {_LACKS})[0].tensors",
    ),
    on_job(
        f"self.optimizer.multipliers.all(m, !{_NEVER_DECAYS})",
        "spec.optimizer.multipliers[%s].weightDecay %s must be left out: these tensors do not decay",
        f"self.optimizer.multipliers.filter(m, {_NEVER_DECAYS})[0].tensors",
        f"self.optimizer.multipliers.filter(m, {_NEVER_DECAYS})[0].weightDecay",
    ),
    on_job(
        "self.optimizer.idleExperts == 'Update' || has(self.model.experts)",
        "spec.optimizer.idleExperts %s is of experts, and spec.model has none; set spec.model.experts, or remove"
        " idleExperts",
        "self.optimizer.idleExperts",
    ),
    on_job(
        "self.optimizer.idleExperts == 'Update' || self.optimizer.clipping.mode == 'Global'",
        "spec.optimizer.idleExperts %s needs spec.optimizer.clipping.mode Global, and it is %s: otherwise experts are"
        " updated before all choices of the step are known; change the mode, or remove idleExperts",
        "self.optimizer.idleExperts",
        "self.optimizer.clipping.mode",
    ),
)
