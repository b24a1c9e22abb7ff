"""Rules across fields, written once in CEL.

The API server evaluates them when a manifest is applied; `pseudoreal_api.spec.check` evaluates the same text for a
local run. Every rule has a message that names the fields and the values at fault. Messages are made by `format`, as the
API server takes the length of `string(integer)` for unbounded and refuses longer concatenations as too expensive.
"""

from dataclasses import dataclass
from typing import Any

from pseudoreal_api.names import HOST_NAME_CHARACTERS
from pseudoreal_api.spec.data import BYTES
from pseudoreal_api.spec.pod import RESERVED_ENV, RESERVED_ENV_PREFIXES

# Jobs are named <job>-<phase>-<digest>-e<execution>; their pods' host names append -<index> and must be DNS labels of
# at most 63 characters. The names of delinks, which are longer, lose what does not fit.
NAME_BUDGET = HOST_NAME_CHARACTERS - len("--abcdef-e999-9999")


@dataclass(frozen=True)
class Rule:
    """A CEL expression that must hold, and a CEL expression for the sentence that says why it does not."""

    rule: str
    message: str

    def to_schema(self) -> dict[str, Any]:
        return {"rule": self.rule, "messageExpression": self.message}


def _says(sentence: str, *values: str) -> str:
    return f"'{sentence}'.format([{', '.join(values)}])"


def _job(holds: str, sentence: str, *values: str) -> Rule:
    return Rule(holds, _says(sentence, *values))


def _each_phase(holds: str, sentence: str, *values: str) -> Rule:
    """A rule on every phase p; the sentence speaks of the first one that breaks it."""
    message = _says(f"spec.phases[%s]{sentence}", "p.name", *values)
    return Rule(f"self.phases.all(p, {holds})", f"self.phases.filter(p, !({holds})).map(p, {message})[0]")


def _each_pair(holds: str, sentence: str, *values: str) -> Rule:
    """A rule on every phase {p} and its successor {q}. CEL macros have no index, so the indices are listed."""
    indices = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]"

    def fill(expression: str) -> str:
        return expression.format(p="self.phases[i]", q="self.phases[i + 1]")

    message = _says(f"spec.phases[%s]{sentence}", fill("{q}.name"), *map(fill, values))
    return Rule(
        f"{indices}.all(i, i + 1 >= size(self.phases) || {fill(holds)})",
        f"{indices}.filter(i, i + 1 < size(self.phases) && !({fill(holds)})).map(i, {message})[0]",
    )


def _blocks(phase: str) -> str:
    return f"(has({phase}.sharing) ? {phase}.sharing.blocks : self.model.layers)"


_BLOCKS_P, _BLOCKS_Q = _blocks("{p}"), _blocks("{q}")
_SAME_PATTERN = "!has({p}.sharing) || !has({q}.sharing) || {p}.sharing.pattern == {q}.sharing.pattern"
_REFINES = (
    f"({_BLOCKS_Q} % {_BLOCKS_P} == 0 && ({_BLOCKS_P} == 1 || {_BLOCKS_Q} == self.model.layers || {_SAME_PATTERN}))"
)

# CEL does not know how many AllRanks are: resolve.py applies these rules to them.
_ALL_RANKS = "p.parallelism.pipeline == 'AllRanks'"
_PIPELINE = "int(p.parallelism.pipeline)"
_NOT_INTERLEAVED = f"p.parallelism.schedule != 'Interleaved' || {_ALL_RANKS}"
_ROUNDS = f"p.batch.microBatches / {_PIPELINE}"

_RESERVED = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_IS_RESERVED = " || ".join(
    [f"e.name in [{_RESERVED}]"] + [f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
)

_ONE_VALUE = "has(e.value) != has(e.valueFrom)"

_NAMED_CLAIM = "(has(self.checkpoint.storage.volume) && has(self.checkpoint.storage.volume.claimName))"

_ONE_LIST = "[size(r.onExitCodes), size(r.onPodConditions), size(r.onReasons)].exists_one(n, n > 0)"

_DESCRIBED = "has(s.weightsAndBiases) == (s.type == 'WeightsAndBiases') && has(s.mlflow) == (s.type == 'MLflow')"
_START = "self.checkpoint.startFrom"
_FIRST_BLOCKS = _blocks("self.phases[0]")
_ATTENTION, _ROTARY, _SCALING = (f"self.model.attention{path}" for path in ("", ".rotary", ".rotary.scaling"))
_EXPERTS = "self.model.experts"
# The next layer that uses the block of layer l of the phase p; behind the last one comes the first.
_SEGMENT = "(self.model.layers / p.sharing.blocks)"
_NEXT_OF_BLOCK = (
    "(p.sharing.pattern == 'Cycle' ? (l + p.sharing.blocks) % self.model.layers"
    f" : l / {_SEGMENT} * {_SEGMENT} + (l % {_SEGMENT} + 1) % {_SEGMENT})"
)
_MIXED = f"{_EXPERTS}.denseLayers.filter(l, !({_NEXT_OF_BLOCK} in {_EXPERTS}.denseLayers))"

_LACKS = (
    "((m.tensors == 'Head' && self.model.embeddings == 'Tied')"
    " || (m.tensors in ['Experts', 'Router'] && !has(self.model.experts))"
    f" || (m.tensors == 'FeedForward' && has(self.model.experts) && size({_EXPERTS}.denseLayers) == 0))"
)
_NEVER_DECAYS = "(m.tensors in ['Norms', 'Biases'] && double(m.weightDecay) != 1.0)"

SPEC_RULES = (
    _job(
        f"has({_ATTENTION}.headSize) || self.model.hiddenSize % (2 * {_ATTENTION}.heads) == 0",
        "spec.model.hiddenSize %d must be a multiple of twice spec.model.attention.heads %d, or"
        " spec.model.attention.headSize be set: rotary positions turn pairs of the features of a head",
        "self.model.hiddenSize",
        f"{_ATTENTION}.heads",
    ),
    _job(
        f"!has({_ATTENTION}.headSize) || {_ATTENTION}.headSize % 2 == 0",
        "spec.model.attention.headSize %d must be even: rotary positions turn pairs of the features of a head",
        f"{_ATTENTION}.headSize",
    ),
    _job(
        f"!has({_ATTENTION}.keyValueHeads) || {_ATTENTION}.heads % {_ATTENTION}.keyValueHeads == 0",
        "spec.model.attention.keyValueHeads %d must divide spec.model.attention.heads %d",
        f"{_ATTENTION}.keyValueHeads",
        f"{_ATTENTION}.heads",
    ),
    _job(
        f"!has({_ROTARY}.base) || double({_ROTARY}.base) > 1.0",
        "spec.model.attention.rotary.base %s must be greater than 1",
        f"{_ROTARY}.base",
    ),
    _job(
        f"!has({_SCALING}) || (has({_SCALING}.llama3) == ({_SCALING}.type == 'Llama3')"
        f" && has({_SCALING}.yarn) == ({_SCALING}.type == 'Yarn'))",
        "spec.model.attention.rotary.scaling.type is %s: set the field of that type, and none of another one",
        f"{_SCALING}.type",
    ),
    *(
        _job(
            f"!has({_SCALING}) || !has({_SCALING}.{kind}) || double({_SCALING}.{kind}.factor) >= 1.0",
            f"spec.model.attention.rotary.scaling.{kind}.factor %s must be at least 1",
            f"{_SCALING}.{kind}.factor",
        )
        for kind in ("llama3", "yarn")
    ),
    _job(
        f"!has({_SCALING}) || !has({_SCALING}.llama3) || double({_SCALING}.llama3.lowFrequencyFactor)"
        f" < double({_SCALING}.llama3.highFrequencyFactor)",
        "spec.model.attention.rotary.scaling.llama3.lowFrequencyFactor %s must be less than highFrequencyFactor %s",
        f"{_SCALING}.llama3.lowFrequencyFactor",
        f"{_SCALING}.llama3.highFrequencyFactor",
    ),
    _job(
        f"!has({_SCALING}) || !has({_SCALING}.yarn) || (double({_SCALING}.yarn.betaSlow) > 0.0"
        f" && double({_SCALING}.yarn.betaSlow) < double({_SCALING}.yarn.betaFast))",
        "spec.model.attention.rotary.scaling.yarn.betaSlow %s must be greater than 0 and less than betaFast %s",
        f"{_SCALING}.yarn.betaSlow",
        f"{_SCALING}.yarn.betaFast",
    ),
    _job(
        f"!has({_ATTENTION}.window) || !has({_ATTENTION}.window.layers)"
        f" || {_ATTENTION}.window.layers.all(l, l < self.model.layers)",
        "spec.model.attention.window.layers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_ATTENTION}.window.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    _job(
        "!has(self.model.norm.epsilon) || double(self.model.norm.epsilon) > 0.0",
        "spec.model.norm.epsilon %s must be greater than 0",
        "self.model.norm.epsilon",
    ),
    _job(
        f"!has(self.model.experts) || has({_EXPERTS}.topK) == ({_EXPERTS}.type == 'TopK')",
        "spec.model.experts.type is %s; topK is set with type TopK, and with no other",
        f"{_EXPERTS}.type",
    ),
    _job(
        f"!has(self.model.experts) || {_EXPERTS}.type != 'TopK' || {_EXPERTS}.prototypes == 1",
        "spec.model.experts.prototypes %d needs spec.model.experts.type Prototypes; remove it",
        f"{_EXPERTS}.prototypes",
    ),
    _job(
        f"!has(self.model.experts) || !has({_EXPERTS}.topK) || {_EXPERTS}.topK.perToken <= {_EXPERTS}.count",
        "spec.model.experts.topK.perToken %d must be at most spec.model.experts.count %d",
        f"{_EXPERTS}.topK.perToken",
        f"{_EXPERTS}.count",
    ),
    _job(
        f"!has(self.model.experts) || !has({_EXPERTS}.topK) || double({_EXPERTS}.topK.scale) > 0.0",
        "spec.model.experts.topK.scale %s must be greater than 0",
        f"{_EXPERTS}.topK.scale",
    ),
    _job(
        f"!has(self.model.experts) || {_EXPERTS}.denseLayers.all(l, l < self.model.layers)",
        "spec.model.experts.denseLayers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_EXPERTS}.denseLayers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    _job(
        f"!has(self.model.experts) || size({_EXPERTS}.denseLayers) < self.model.layers",
        "spec.model.experts.denseLayers has %d layers, all of spec.model.layers %d; remove spec.model.experts",
        f"size({_EXPERTS}.denseLayers)",
        "self.model.layers",
    ),
    _job(
        "!has(self.model.family) || !(self.model.family in ['Mixtral', 'Qwen3MoE'])"
        f" || (has(self.model.experts) && {_EXPERTS}.type == 'TopK')",
        "spec.model.family %s needs spec.model.experts with type TopK",
        "self.model.family",
    ),
    _job(
        f"size(self.data.sources) > 0 || self.model.vocabularySize >= {BYTES}",
        f"spec.model.vocabularySize %d must be at least {BYTES}: text is trained on as bytes",
        "self.model.vocabularySize",
    ),
    _job(
        "self.data.documents.masking == 'None' || size(self.data.sources) > 0",
        "spec.data.documents.masking %s needs spec.data.sources: in text that is trained on as bytes nothing ends a"
        " document",
        "self.data.documents.masking",
    ),
    _job(
        "!has(self.data.documents.endToken) || self.data.documents.endToken < self.model.vocabularySize",
        "spec.data.documents.endToken %d must be below spec.model.vocabularySize %d",
        "self.data.documents.endToken",
        "self.model.vocabularySize",
    ),
    _job(
        "!has(self.model.logitSoftCap) || double(self.model.logitSoftCap) > 0.0",
        "spec.model.logitSoftCap %s must be greater than 0; leave it out for logits without a bound",
        "self.model.logitSoftCap",
    ),
    _job(
        "!has(self.model.experts) || self.model.experts.count % self.model.experts.prototypes == 0",
        "spec.model.experts.count %d must be a multiple of spec.model.experts.prototypes %d",
        "self.model.experts.count",
        "self.model.experts.prototypes",
    ),
    _job(
        "!has(self.model.experts) || double(self.model.experts.capacityFactor) > 0.0",
        "spec.model.experts.capacityFactor %s must be greater than 0",
        "self.model.experts.capacityFactor",
    ),
    _job(
        "double(self.data.validation.fraction) > 0.0 && double(self.data.validation.fraction) < 1.0",
        "spec.data.validation.fraction %s must lie between 0 and 1, both excluded",
        "self.data.validation.fraction",
    ),
    _job(
        "size(self.data.sources) == 0 || size(self.data.validation.sets) > 0",
        "spec.data.validation.sets: beside the %d spec.data.sources there must be one at least; name files of tokens"
        " that are not trained on",
        "size(self.data.sources)",
    ),
    _job(
        "size(self.data.sources) > 0 || size(self.data.validation.sets) == 0",
        "spec.data.validation.sets: the %d sets are tokens, and without spec.data.sources training reads text; remove"
        " them, and spec.data.validation.fraction of the text is measured",
        "size(self.data.validation.sets)",
    ),
    _job(
        "has(self.data.tokenizer.path) == (self.data.tokenizer.type == 'File')",
        "spec.data.tokenizer.type is %s: File needs spec.data.tokenizer.path, and Bytes has none",
        "self.data.tokenizer.type",
    ),
    _job(
        "self.data.tokenizer.type == 'Bytes' || size(self.data.sources) > 0",
        "spec.data.tokenizer.type %s is for spec.data.sources, and text is trained on as bytes; run `pseudoreal data"
        " prepare` with that tokenizer, and name what it writes in spec.data.sources",
        "self.data.tokenizer.type",
    ),
    _job(
        "double(self.optimizer.learningRate) > 0.0",
        "spec.optimizer.learningRate %s must be greater than 0",
        "self.optimizer.learningRate",
    ),
    _job(
        "double(self.optimizer.finalFraction) <= 1.0",
        "spec.optimizer.finalFraction %s must be at most 1",
        "self.optimizer.finalFraction",
    ),
    _job(
        "double(self.optimizer.decayFraction) > 0.0 && double(self.optimizer.decayFraction) <= 1.0",
        "spec.optimizer.decayFraction %s must be greater than 0 and at most 1",
        "self.optimizer.decayFraction",
    ),
    _job(
        "double(self.optimizer.beta1) < 1.0 && double(self.optimizer.beta2) < 1.0",
        "spec.optimizer.beta1 %s and spec.optimizer.beta2 %s must be less than 1",
        "self.optimizer.beta1",
        "self.optimizer.beta2",
    ),
    _job(
        "double(self.optimizer.epsilon) > 0.0",
        "spec.optimizer.epsilon %s must be greater than 0: a parameter without a gradient would be divided by 0",
        "self.optimizer.epsilon",
    ),
    _job(
        "self.model.embeddings != 'Tied' || !('Head' in self.optimizer.decayExclusions)",
        "spec.optimizer.decayExclusions has Head, but with spec.model.embeddings %s there is no head of its own; write"
        " Embedding for the one matrix",
        "self.model.embeddings",
    ),
    _job(
        f"self.optimizer.multipliers.all(m, !{_LACKS})",
        "spec.optimizer.multipliers[%s]: spec.model has none of these tensors; remove it. A tied head is the Embedding",
        f"self.optimizer.multipliers.filter(m, {_LACKS})[0].tensors",
    ),
    _job(
        f"self.optimizer.multipliers.all(m, !{_NEVER_DECAYS})",
        "spec.optimizer.multipliers[%s].weightDecay %s must be left out: these tensors do not decay",
        f"self.optimizer.multipliers.filter(m, {_NEVER_DECAYS})[0].tensors",
        f"self.optimizer.multipliers.filter(m, {_NEVER_DECAYS})[0].weightDecay",
    ),
    _job(
        "self.phases.all(p, self.phases.exists_one(q, q.name == p.name))",
        "spec.phases: the name %s is used by more than one phase; names must differ",
        "self.phases.filter(p, !self.phases.exists_one(q, q.name == p.name))[0].name",
    ),
    _each_phase(
        f"self.model.layers % {_blocks('p')} == 0",
        ".sharing.blocks %d must divide spec.model.layers %d",
        "p.sharing.blocks",
        "self.model.layers",
    ),
    _each_phase(
        f"!has(self.model.experts) || !has(p.sharing) || self.model.layers % p.sharing.blocks != 0"
        f" || {_EXPERTS}.denseLayers.all(l, {_NEXT_OF_BLOCK} in {_EXPERTS}.denseLayers)",
        ".sharing: layer %d of spec.model.experts.denseLayers shares a block with layer %d, which has experts; the two"
        " kinds have no weights in common",
        f"{_MIXED}[0]",
        f"{_MIXED}.map(l, {_NEXT_OF_BLOCK})[0]",
    ),
    _each_phase(
        f"{_ALL_RANKS} || {_PIPELINE} <= self.model.layers",
        ".parallelism.pipeline %d must be at most spec.model.layers %d",
        _PIPELINE,
        "self.model.layers",
    ),
    _each_phase(
        f"{_NOT_INTERLEAVED} || self.model.layers % {_PIPELINE} == 0",
        ".parallelism.pipeline %d must divide spec.model.layers %d in the schedule Interleaved",
        _PIPELINE,
        "self.model.layers",
    ),
    _each_phase(
        f"{_NOT_INTERLEAVED} || {_ROUNDS} < 2 || p.batch.microBatches % ({_ROUNDS}) == 0",
        ".batch.microBatches %d must split into %d equal rounds in the schedule Interleaved;"
        " a multiple of parallelism.pipeline %d does",
        "p.batch.microBatches",
        _ROUNDS,
        _PIPELINE,
    ),
    _each_phase(
        "p.activations.home == 'Device' || p.activations.keep == 'Inputs'",
        ".activations.home %s needs activations.keep Inputs, but it is All: only the inputs of blocks can move",
        "p.activations.home",
    ),
    _each_phase(
        "!has(p.offload.budget) || (p.offload.home == 'Device' && size(p.offload.homes) == 0)",
        ".offload.budget chooses the homes, but offload.home is %s and offload.homes has %d entries;"
        " remove either the budget or both of them",
        "p.offload.home",
        "size(p.offload.homes)",
    ),
    _each_phase(
        "p.batch.sequences % p.batch.microBatches == 0",
        ".batch.microBatches %d must divide sequences %d",
        "p.batch.microBatches",
        "p.batch.sequences",
    ),
    _each_phase(
        "has(p.until.step) || has(p.until.tokens)",
        ".until has neither step nor tokens; set one, so that the phase ends even if the loss is never reached",
    ),
    _each_phase(
        f"!has(p.until.gradientCorrelation) || {_blocks('p')} < self.model.layers",
        ".until.gradientCorrelation compares layers that share a block, but the phase has %d blocks for"
        " spec.model.layers %d; remove it or lower sharing.blocks",
        _blocks("p"),
        "self.model.layers",
    ),
    _each_phase(
        "!has(p.until.gradientCorrelation) || double(p.until.gradientCorrelation.below) <= 1.0",
        ".until.gradientCorrelation.below %s must be at most 1, as it is a cosine",
        "p.until.gradientCorrelation.below",
    ),
    _each_pair(
        _REFINES,
        ".sharing must refine that of phase %s: its %d blocks must be a multiple of %d, in the same pattern",
        "{p}.name",
        _BLOCKS_Q,
        _BLOCKS_P,
    ),
    _each_pair(
        "(!has({p}.until.step) || !has({q}.until.step) || {p}.until.step < {q}.until.step)",
        ".until.step %d must be greater than the %d of phase %s: steps count from the start of the job",
        "{q}.until.step",
        "{p}.until.step",
        "{p}.name",
    ),
    _each_pair(
        "(!has({p}.until.tokens) || !has({q}.until.tokens) || {p}.until.tokens < {q}.until.tokens)",
        ".until.tokens %d must be greater than the %d of phase %s: tokens count from the start of the job",
        "{q}.until.tokens",
        "{p}.until.tokens",
        "{p}.name",
    ),
    _job(
        "!has(self.data.volume) || self.data.path.startsWith('/')",
        "spec.data.path %s must be absolute, as spec.data.volume is mounted there",
        "self.data.path",
    ),
    _job(
        "self.checkpoint.storage.type == 'Volume' || has(self.checkpoint.storage.objectStorage)",
        "spec.checkpoint.storage.type %s needs spec.checkpoint.storage.objectStorage; set it",
        "self.checkpoint.storage.type",
    ),
    _job(
        "self.checkpoint.storage.type == 'Volume' ? !has(self.checkpoint.storage.objectStorage)"
        " : !has(self.checkpoint.storage.volume)",
        "spec.checkpoint.storage.type is %s, but the storage of the other type is set beside it; remove that, or change"
        " the type",
        "self.checkpoint.storage.type",
    ),
    _job(
        f"!{_NAMED_CLAIM} || !has(self.checkpoint.storage.volume.claimTemplate)",
        "spec.checkpoint.storage.volume has both claimName %s and claimTemplate; name a claim that exists, or describe"
        " one to be made",
        "self.checkpoint.storage.volume.claimName",
    ),
    _job(
        f"!{_NAMED_CLAIM} || self.checkpoint.storage.volume.retentionPolicy == 'Retain'",
        "spec.checkpoint.storage.volume.retentionPolicy %s is for a claim that is made for the job, but claimName %s"
        " names one; remove one of them",
        "self.checkpoint.storage.volume.retentionPolicy",
        "self.checkpoint.storage.volume.claimName",
    ),
    _job(
        f"!has({_START}) || has({_START}.huggingFace)",
        "spec.checkpoint.startFrom.type %s needs spec.checkpoint.startFrom.huggingFace; set it",
        f"{_START}.type",
    ),
    _job(
        f"!has({_START}) || !has(self.checkpoint.continueFrom)",
        "spec.checkpoint.continueFrom is %s, and spec.checkpoint.startFrom names other weights to begin with; remove"
        " one of them",
        "self.checkpoint.continueFrom",
    ),
    _job(
        f"!has({_START}) || !has({_START}.huggingFace) || !has({_START}.huggingFace.volume)"
        f" || {_START}.huggingFace.path.startsWith('/')",
        "spec.checkpoint.startFrom.huggingFace.path %s must be absolute, as"
        " spec.checkpoint.startFrom.huggingFace.volume is mounted there",
        f"{_START}.huggingFace.path",
    ),
    _job(
        f"!has({_START}) || ({_START}.blocks.type == 'Listed') == (size({_START}.blocks.layers) > 0)",
        "spec.checkpoint.startFrom.blocks.type is %s: Listed needs spec.checkpoint.startFrom.blocks.layers, and no"
        " other type has them",
        f"{_START}.blocks.type",
    ),
    _job(
        f"!has({_START}) || {_START}.blocks.layers.all(l, l < self.model.layers)",
        "spec.checkpoint.startFrom.blocks.layers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_START}.blocks.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    _job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || {_FIRST_BLOCKS} < self.model.layers",
        "spec.checkpoint.startFrom.blocks.layers: the phase %s shares no blocks, so that each layer begins as itself;"
        " remove spec.checkpoint.startFrom.blocks",
        "self.phases[0].name",
    ),
    _job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || size({_START}.blocks.layers) == {_FIRST_BLOCKS}",
        "spec.checkpoint.startFrom.blocks.layers has %d layers, and the phase %s has %d blocks; name a layer for each",
        f"size({_START}.blocks.layers)",
        "self.phases[0].name",
        _FIRST_BLOCKS,
    ),
    _job(
        f"self.logging.sinks.all(s, {_DESCRIBED})",
        "spec.logging.sinks: the one of type %s needs the field of that type, and no other; set weightsAndBiases for"
        " WeightsAndBiases, mlflow for MLflow",
        f"self.logging.sinks.filter(s, !({_DESCRIBED}))[0].type",
    ),
    _job(
        f"self.restart.rules.all(r, {_ONE_LIST})",
        "spec.restart.rules: the rule with the action %s needs exactly one of onExitCodes, onPodConditions, onReasons",
        f"self.restart.rules.filter(r, !({_ONE_LIST}))[0].action",
    ),
    _job(
        "!has(self.restart.windowSeconds) || self.restart.maxRestarts <= 100",
        "spec.restart.maxRestarts %d must be at most 100 beside spec.restart.windowSeconds, as each one is remembered",
        "self.restart.maxRestarts",
    ),
    _job(
        "double(self.hang.stragglerFactor) > 1.0",
        "spec.hang.stragglerFactor %s must be greater than 1",
        "self.hang.stragglerFactor",
    ),
    _job(
        "self.requests.all(r, self.phases.exists(p, p.name == r.phase))",
        "spec.requests[%s].phase %s is none of spec.phases; name one of them",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].id",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].phase",
    ),
    _job(
        "self.network.mode != 'RDMA' || has(self.network.rdmaResource) || self.network.hostNetwork",
        "spec.network.mode %s needs adapters in the pods; set network.rdmaResource to the resource of an"
        " RDMA device plugin, or network.hostNetwork",
        "self.network.mode",
    ),
    _job(
        f"self.pod.env.all(e, !({_IS_RESERVED}))",
        "spec.pod.env: the name %s is reserved for the operator; remove it",
        f"self.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    _job(
        f"self.pod.env.all(e, {_ONE_VALUE})",
        "spec.pod.env[%s] needs either value or valueFrom; set one of them",
        f"self.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
    _each_phase(
        f"p.pod.env.all(e, !({_IS_RESERVED}))",
        ".pod.env: the name %s is reserved for the operator; remove it",
        f"p.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    _each_phase(
        f"p.pod.env.all(e, {_ONE_VALUE})",
        ".pod.env[%s] needs either value or valueFrom; set one of them",
        f"p.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
)

_TOO_LONG = f"size(self.metadata.name) + size(p.name) > {NAME_BUDGET}"
METADATA_RULES = (
    Rule(
        f"self.spec.phases.all(p, !({_TOO_LONG}))",
        f"self.spec.phases.filter(p, {_TOO_LONG}).map(p, "
        + _says(
            "metadata.name %s and the phase name %s have %d characters together;"
            f" at most {NAME_BUDGET} fit into the host names of the pods",
            "self.metadata.name",
            "p.name",
            "size(self.metadata.name) + size(p.name)",
        )
        + ")[0]",
    ),
    _job(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name %s must begin with a letter and have no dots: it becomes part of host names",
        "self.metadata.name",
    ),
)
