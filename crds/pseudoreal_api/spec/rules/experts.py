"""Rules on the experts of a layer."""

from pseudoreal_api.spec.rules.rule import on_job

_EXPERTS = "self.model.experts"

EXPERT_RULES = (
    on_job(
        f"!has(self.model.experts) || has({_EXPERTS}.topK) == ({_EXPERTS}.type == 'TopK')",
        "spec.model.experts.type is %s; topK is set with type TopK, and with no other",
        f"{_EXPERTS}.type",
    ),
    on_job(
        f"!has(self.model.experts) || {_EXPERTS}.type != 'TopK' || {_EXPERTS}.prototypes == 1",
        "spec.model.experts.prototypes %d needs spec.model.experts.type Prototypes; remove it",
        f"{_EXPERTS}.prototypes",
    ),
    on_job(
        f"!has(self.model.experts) || !has({_EXPERTS}.topK) || {_EXPERTS}.topK.perToken <= {_EXPERTS}.count",
        "spec.model.experts.topK.perToken %d must be at most spec.model.experts.count %d",
        f"{_EXPERTS}.topK.perToken",
        f"{_EXPERTS}.count",
    ),
    on_job(
        f"!has(self.model.experts) || !has({_EXPERTS}.topK) || double({_EXPERTS}.topK.scale) > 0.0",
        "spec.model.experts.topK.scale %s must be greater than 0",
        f"{_EXPERTS}.topK.scale",
    ),
    on_job(
        f"!has(self.model.experts) || !has({_EXPERTS}.topK) || {_EXPERTS}.topK.balanceOver == 'Sequence'"
        f" || double({_EXPERTS}.topK.auxiliaryLoss) > 0.0",
        "spec.model.experts.topK.balanceOver %s is of a loss whose factor, auxiliaryLoss, is %s; set auxiliaryLoss, or"
        " remove balanceOver",
        f"{_EXPERTS}.topK.balanceOver",
        f"{_EXPERTS}.topK.auxiliaryLoss",
    ),
    on_job(
        f"!has(self.model.experts) || {_EXPERTS}.denseLayers.all(l, l < self.model.layers)",
        "spec.model.experts.denseLayers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_EXPERTS}.denseLayers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        f"!has(self.model.experts) || size({_EXPERTS}.denseLayers) < self.model.layers",
        "spec.model.experts.denseLayers has %d layers, all of spec.model.layers %d; remove spec.model.experts",
        f"size({_EXPERTS}.denseLayers)",
        "self.model.layers",
    ),
    on_job(
        "!has(self.model.family) || !(self.model.family in ['Mixtral', 'Qwen3MoE'])"
        f" || (has(self.model.experts) && {_EXPERTS}.type == 'TopK')",
        "spec.model.family %s needs spec.model.experts with type TopK",
        "self.model.family",
    ),
)

PROTOTYPE_RULES = (
    on_job(
        "!has(self.model.experts) || self.model.experts.count % self.model.experts.prototypes == 0",
        "spec.model.experts.count %d must be a multiple of spec.model.experts.prototypes %d",
        "self.model.experts.count",
        "self.model.experts.prototypes",
    ),
    on_job(
        "!has(self.model.experts) || double(self.model.experts.capacityFactor) > 0.0",
        "spec.model.experts.capacityFactor %s must be greater than 0",
        "self.model.experts.capacityFactor",
    ),
)
