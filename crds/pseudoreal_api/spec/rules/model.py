"""Rules on a layer: attention, rotary positions, windows, norms."""

from pseudoreal_api.spec.rules.rule import on_job

_ATTENTION, _ROTARY, _SCALING = (f"self.model.attention{path}" for path in ("", ".rotary", ".rotary.scaling"))

MODEL_RULES = (
    on_job(
        f"has({_ATTENTION}.headSize) || self.model.hiddenSize % (2 * {_ATTENTION}.heads) == 0",
        "spec.model.hiddenSize %d must be a multiple of twice spec.model.attention.heads %d, or"
        " spec.model.attention.headSize be set: rotary positions turn pairs of the features of a head",
        "self.model.hiddenSize",
        f"{_ATTENTION}.heads",
    ),
    on_job(
        f"!has({_ATTENTION}.headSize) || {_ATTENTION}.headSize % 2 == 0",
        "spec.model.attention.headSize %d must be even: rotary positions turn pairs of the features of a head",
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
        "spec.model.attention.rotary.scaling.type is %s: set the field of that type, and none of another one",
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
        "spec.model.attention.window.layers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_ATTENTION}.window.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        "!has(self.model.norm.epsilon) || double(self.model.norm.epsilon) >= 1e-37",
        "spec.model.norm.epsilon %s must be at least 1e-37: in float32 it would be 0, and a token of zeros would be"
        " divided by that",
        "self.model.norm.epsilon",
    ),
)
