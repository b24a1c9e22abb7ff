"""Rules on the model: attention, rotary positions, windows, norms; experts; tokens."""

from pseudoreal_api.spec.rules.rule import on_job

_ATTENTION, _ROTARY, _SCALING = (f"self.model.attention{path}" for path in ("", ".rotary", ".rotary.scaling"))
_EXPERTS = "self.model.experts"
_BYTES = 256
"""Vocabulary size of the tokenizer Bytes."""

MODEL_RULES = (
    on_job(
        f"has({_ATTENTION}.headSize) || self.model.hiddenSize % (2 * {_ATTENTION}.heads) == 0",
        "spec.model.hiddenSize %d must be a multiple of twice spec.model.attention.heads %d, because rotary positions"
        " rotate pairs of features of a head; change one of them, or set spec.model.attention.headSize",
        "self.model.hiddenSize",
        f"{_ATTENTION}.heads",
    ),
    on_job(
        f"!has({_ATTENTION}.headSize) || {_ATTENTION}.headSize % 2 == 0",
        "spec.model.attention.headSize %d must be even, because rotary positions rotate pairs of features of a head",
        f"{_ATTENTION}.headSize",
    ),
    on_job(
        f"!has({_ATTENTION}.keyValueHeads) || {_ATTENTION}.heads % {_ATTENTION}.keyValueHeads == 0",
        "spec.model.attention.keyValueHeads %d must divide spec.model.attention.heads %d",
        f"{_ATTENTION}.keyValueHeads",
        f"{_ATTENTION}.heads",
    ),
    on_job(
        f"!has({_ROTARY}.base) || double({_ROTARY}.base) > 1.0",
        "spec.model.attention.rotary.base %s must be greater than 1",
        f"{_ROTARY}.base",
    ),
    on_job(
        f"!has({_SCALING}) || (has({_SCALING}.llama3) == ({_SCALING}.type == 'Llama3')"
        f" && has({_SCALING}.yarn) == ({_SCALING}.type == 'Yarn'))",
        "spec.model.attention.rotary.scaling.type is %s; set the field of this type, and remove the other field",
        f"{_SCALING}.type",
    ),
    *(
        on_job(
            f"!has({_SCALING}) || !has({_SCALING}.{kind}) || double({_SCALING}.{kind}.factor) >= 1.0",
            f"spec.model.attention.rotary.scaling.{kind}.factor %s must be at least 1",
            f"{_SCALING}.{kind}.factor",
        )
        for kind in ("llama3", "yarn")
    ),
    on_job(
        f"!has({_SCALING}) || !has({_SCALING}.llama3) || double({_SCALING}.llama3.lowFrequencyFactor)"
        f" < double({_SCALING}.llama3.highFrequencyFactor)",
        "spec.model.attention.rotary.scaling.llama3.lowFrequencyFactor %s must be less than highFrequencyFactor %s",
        f"{_SCALING}.llama3.lowFrequencyFactor",
        f"{_SCALING}.llama3.highFrequencyFactor",
    ),
    on_job(
        f"!has({_SCALING}) || !has({_SCALING}.yarn) || (double({_SCALING}.yarn.betaSlow) > 0.0"
        f" && double({_SCALING}.yarn.betaSlow) < double({_SCALING}.yarn.betaFast))",
        "spec.model.attention.rotary.scaling.yarn.betaSlow %s must be greater than 0 and less than betaFast %s",
        f"{_SCALING}.yarn.betaSlow",
        f"{_SCALING}.yarn.betaFast",
    ),
    on_job(
        f"!has({_ATTENTION}.window) || !has({_ATTENTION}.window.layers)"
        f" || {_ATTENTION}.window.layers.all(l, l < self.model.layers)",
        "spec.model.attention.window.layers: there is no layer %d, as spec.model.layers is %d and the first layer is 0",
        f"{_ATTENTION}.window.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        "!has(self.model.norm.epsilon) || double(self.model.norm.epsilon) >= 1e-37",
        "spec.model.norm.epsilon %s must be at least 1e-37: float32 rounds very small numbers to 0, and the norm of a"
        " token of zeros would divide by 0",
        "self.model.norm.epsilon",
    ),
    # Experts.
    on_job(
        f"!has(self.model.experts) || has({_EXPERTS}.topK) == ({_EXPERTS}.type == 'TopK')",
        "spec.model.experts.type is %s; set topK with type TopK, and remove topK with type Prototypes",
        f"{_EXPERTS}.type",
    ),
    on_job(
        f"!has(self.model.experts) || {_EXPERTS}.type != 'TopK' || {_EXPERTS}.prototypes == 1",
        "spec.model.experts.prototypes %d needs spec.model.experts.type Prototypes; remove prototypes",
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
        "spec.model.experts.topK.balanceOver %s applies to a balance loss, whose coefficient auxiliaryLoss is %s; set"
        " auxiliaryLoss, or remove balanceOver",
        f"{_EXPERTS}.topK.balanceOver",
        f"{_EXPERTS}.topK.auxiliaryLoss",
    ),
    on_job(
        f"!has(self.model.experts) || {_EXPERTS}.denseLayers.all(l, l < self.model.layers)",
        "spec.model.experts.denseLayers: there is no layer %d, as spec.model.layers is %d and the first layer is 0",
        f"{_EXPERTS}.denseLayers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        f"!has(self.model.experts) || size({_EXPERTS}.denseLayers) < self.model.layers",
        "spec.model.experts.denseLayers has %d layers, and spec.model.layers is %d, so no layer has experts; remove"
        " spec.model.experts",
        f"size({_EXPERTS}.denseLayers)",
        "self.model.layers",
    ),
    on_job(
        "!has(self.model.family) || !(self.model.family in ['Mixtral', 'Qwen3MoE'])"
        f" || (has(self.model.experts) && {_EXPERTS}.type == 'TopK')",
        "spec.model.family %s needs spec.model.experts with type TopK",
        "self.model.family",
    ),
    # Tokens.
    on_job(
        f"size(self.data.sources) > 0 || self.model.vocabularySize >= {_BYTES}",
        f"spec.model.vocabularySize %d must be at least {_BYTES}: without spec.data.sources, tokens are bytes of text",
        "self.model.vocabularySize",
    ),
    on_job(
        "self.data.documents.masking == 'None' || size(self.data.sources) > 0",
        "spec.data.documents.masking %s needs spec.data.sources: if tokens are bytes of text, no token ends a document",
        "self.data.documents.masking",
    ),
    on_job(
        "!has(self.data.documents.endToken) || self.data.documents.endToken < self.model.vocabularySize",
        "spec.data.documents.endToken %d must be below spec.model.vocabularySize %d",
        "self.data.documents.endToken",
        "self.model.vocabularySize",
    ),
    on_job(
        "!has(self.model.logitSoftCap) || double(self.model.logitSoftCap) > 0.0",
        "spec.model.logitSoftCap %s must be greater than 0; leave it out for logits without a bound",
        "self.model.logitSoftCap",
    ),
    # Prototypes.
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
