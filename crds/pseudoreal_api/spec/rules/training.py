"""Rules on training: the data, the optimizer, each phase, and pairs of consecutive phases."""

from pseudoreal_api.spec.rules.rule import on_each_pair, on_each_phase, on_job

_LACKS = (
    "((m.tensors == 'Head' && self.model.embeddings == 'Tied')"
    " || (m.tensors in ['Experts', 'Router'] && !has(self.model.experts))"
    " || (m.tensors == 'FeedForward' && has(self.model.experts) && size(self.model.experts.denseLayers) == 0))"
)
_NEVER_DECAYS = "(m.tensors in ['Norms', 'Biases'] && double(m.weightDecay) != 1.0)"


# Other rules on a phase with `layers` or `experts` of its own are in resolved/check.py.
_LAST = "self.phases[size(self.phases) - 1]"


def blocks_of(phase: str) -> str:
    """Return a CEL expression for the number of blocks of a phase with all layers of the model."""
    return f"(has({phase}.sharing) ? {phase}.sharing.blocks : self.model.layers)"


_BLOCKS_P, _BLOCKS_Q = blocks_of("{p}"), blocks_of("{q}")
_SAME_PATTERN = "!has({p}.sharing) || !has({q}.sharing) || {p}.sharing.pattern == {q}.sharing.pattern"
_REFINES = (
    f"({_BLOCKS_Q} % {_BLOCKS_P} == 0 && ({_BLOCKS_P} == 1 || {_BLOCKS_Q} == self.model.layers || {_SAME_PATTERN}))"
)

_EXPERTS_P, _EXPERTS_Q = (f"(has({{{x}}}.sharing) && 'Experts' in {{{x}}}.sharing.parts)" for x in "pq")

# CEL cannot resolve AllRanks to a number: resolve.py applies these rules to it.
_ALL_RANKS = "p.parallelism.pipeline == 'AllRanks'"
_PIPELINE = "int(p.parallelism.pipeline)"
_NOT_INTERLEAVED = f"p.parallelism.schedule != 'Interleaved' || {_ALL_RANKS}"
_ROUNDS = f"p.batch.microBatches / {_PIPELINE}"
_DEFAULT_SHARDING = "!has(p.parallelism.stateSharding)"

_DENSE_LAYERS = "self.model.experts.denseLayers"
# Next layer that uses the block of layer l in phase p; after the last such layer comes the first.
_SEGMENT = "(self.model.layers / p.sharing.blocks)"
_NEXT_OF_BLOCK = (
    "(p.sharing.pattern == 'Cycle' ? (l + p.sharing.blocks) % self.model.layers"
    f" : l / {_SEGMENT} * {_SEGMENT} + (l % {_SEGMENT} + 1) % {_SEGMENT})"
)
_MIXED = f"{_DENSE_LAYERS}.filter(l, !({_NEXT_OF_BLOCK} in {_DENSE_LAYERS}))"

TRAINING_RULES = (
    # Validation, token sets, tokenizer.
    on_job(
        "double(self.data.validation.fraction) > 0.0 && double(self.data.validation.fraction) < 1.0",
        "spec.data.validation.fraction %s must lie between 0 and 1, both excluded",
        "self.data.validation.fraction",
    ),
    on_job(
        "size(self.data.sources) == 0 || size(self.data.validation.sets) > 0",
        "spec.data.validation.sets is empty, but the %d spec.data.sources need at least one set; name files of tokens"
        " that training does not read",
        "size(self.data.sources)",
    ),
    on_job(
        "size(self.data.sources) > 0 || size(self.data.validation.sets) == 0",
        "spec.data.validation.sets has %d sets of tokens, but without spec.data.sources training reads text; remove"
        " sets, and spec.data.validation.fraction of the text is held out",
        "size(self.data.validation.sets)",
    ),
    on_job(
        "has(self.data.tokenizer.path) == (self.data.tokenizer.type == 'File')",
        "spec.data.tokenizer.type is %s: File needs spec.data.tokenizer.path, and Bytes has none",
        "self.data.tokenizer.type",
    ),
    on_job(
        "self.data.tokenizer.type == 'Bytes' || size(self.data.sources) > 0",
        "spec.data.tokenizer.type %s needs spec.data.sources, because the tokens of text are its bytes; run"
        " `pseudoreal data prepare` with this tokenizer, and name its output in spec.data.sources",
        "self.data.tokenizer.type",
    ),
    # Optimizer, and tensors with settings of their own.
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
        "spec.optimizer.epsilon %s must be at least 1e-37: float32 rounds very small numbers to 0, and the update of a"
        " parameter without a gradient would divide by 0",
        "self.optimizer.epsilon",
    ),
    on_job(
        "self.model.embeddings != 'Tied' || !('Head' in self.optimizer.decayExclusions)",
        "spec.optimizer.decayExclusions has Head, but with spec.model.embeddings %s the head is the matrix Embedding;"
        " remove Head, or write Embedding instead",
        "self.model.embeddings",
    ),
    on_job(
        f"self.optimizer.multipliers.all(m, !{_LACKS})",
        "spec.optimizer.multipliers[%s]: spec.model has no such tensors; remove the entry (a tied head is Embedding)",
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
        "spec.optimizer.idleExperts %s applies to experts, and spec.model has none; set spec.model.experts, or"
        " remove idleExperts",
        "self.optimizer.idleExperts",
    ),
    on_job(
        "self.optimizer.idleExperts == 'Update' || self.optimizer.clipping.mode == 'Global'",
        "spec.optimizer.idleExperts %s needs spec.optimizer.clipping.mode Global, and it is %s: otherwise experts are"
        " updated before all tokens of the step are routed; change the mode, or remove idleExperts",
        "self.optimizer.idleExperts",
        "self.optimizer.clipping.mode",
    ),
    on_job(
        "self.optimizer.clipping.updates == 'AfterNorm' || self.optimizer.clipping.mode == 'Global'",
        "spec.optimizer.clipping.updates %s needs mode Global, and it is %s, which does not wait for the norm of"
        " the whole gradient; remove updates",
        "self.optimizer.clipping.updates",
        "self.optimizer.clipping.mode",
    ),
    on_job(
        "self.optimizer.algorithm == 'AdamW' || self.optimizer.moments == 'Master'",
        "spec.optimizer.moments %s needs algorithm AdamW, but algorithm is %s; remove moments, or remove algorithm",
        "self.optimizer.moments",
        "self.optimizer.algorithm",
    ),
    # Phases.
    on_job(
        "self.phases.all(p, self.phases.exists_one(q, q.name == p.name))",
        "spec.phases: the name %s is used by more than one phase; names must differ",
        "self.phases.filter(p, !self.phases.exists_one(q, q.name == p.name))[0].name",
    ),
    on_job(
        # Not in check.py: the operator checks the phases up to the present one, whatever is wrong with later ones.
        f"!has({_LAST}.layers) && !has({_LAST}.experts)",
        "spec.phases[%s] is the last phase, which has all layers and experts of spec.model; remove layers and experts",
        f"{_LAST}.name",
    ),
    on_each_phase(
        f"has(p.layers) || self.model.layers % {blocks_of('p')} == 0",
        ".sharing.blocks %d must divide spec.model.layers %d",
        "p.sharing.blocks",
        "self.model.layers",
    ),
    on_each_phase(
        "has(p.layers) || !has(self.model.experts) || !has(p.sharing) || self.model.layers % p.sharing.blocks != 0"
        f" || 'Experts' in p.sharing.parts || {_DENSE_LAYERS}.all(l, {_NEXT_OF_BLOCK} in {_DENSE_LAYERS})",
        ".sharing: layer %d of spec.model.experts.denseLayers shares a block with layer %d, which has experts;"
        " layers with and without experts cannot share weights",
        f"{_MIXED}[0]",
        f"{_MIXED}.map(l, {_NEXT_OF_BLOCK})[0]",
    ),
    on_each_phase(
        "!has(p.sharing) || !('Experts' in p.sharing.parts) || has(self.model.experts)",
        ".sharing.parts is Experts, but spec.model has no experts; set spec.model.experts, or remove parts",
    ),
    on_each_phase(
        f"has(p.layers) || {_ALL_RANKS} || {_PIPELINE} <= self.model.layers",
        ".parallelism.pipeline %d must be at most spec.model.layers %d",
        _PIPELINE,
        "self.model.layers",
    ),
    on_each_phase(
        f"has(p.layers) || {_NOT_INTERLEAVED} || self.model.layers % {_PIPELINE} == 0",
        ".parallelism.pipeline %d must divide spec.model.layers %d in the schedule Interleaved",
        _PIPELINE,
        "self.model.layers",
    ),
    on_each_phase(
        f"{_NOT_INTERLEAVED} || {_ROUNDS} < 2 || p.batch.microBatches % ({_ROUNDS}) == 0",
        ".batch.microBatches %d must split into %d equal rounds with the schedule Interleaved;"
        " use a multiple of parallelism.pipeline %d",
        "p.batch.microBatches",
        _ROUNDS,
        _PIPELINE,
    ),
    on_each_phase(
        f"p.parallelism.layout == 'Given' || (!({_ALL_RANKS}) && {_PIPELINE} == 1 && p.parallelism.replicas == 1"
        " && p.parallelism.expertRanks == 1 && p.parallelism.contextRanks == 1 && p.parallelism.tensorRanks == 1"
        " && p.parallelism.schedule == 'Layered'"
        f" && ({_DEFAULT_SHARDING} || p.parallelism.stateSharding == 'None'))",
        ".parallelism.layout Auto chooses pipeline, schedule, stateSharding, replicas, expertRanks, contextRanks and"
        " tensorRanks; remove these fields from parallelism, or remove layout",
    ),
    on_each_phase(
        "p.parallelism.layout == 'Given' || (p.batch.microBatches == 1 && p.activations.keep == 'Inputs')",
        ".parallelism.layout Auto chooses batch.microBatches and activations.keep, which are %d and %s; remove them, or"
        " remove layout",
        "p.batch.microBatches",
        "p.activations.keep",
    ),
    on_each_phase(
        "p.parallelism.layout == 'Auto' || !has(p.parallelism.hardware)",
        (
            ".parallelism.hardware is the profile with which layout Auto predicts step times, but layout is %s; set"
            " layout to Auto, or remove hardware"
        ),
        "p.parallelism.layout",
    ),
    on_each_phase(
        f"p.parallelism.replicas == 1 || {_DEFAULT_SHARDING} || p.parallelism.stateSharding != 'None'",
        ".parallelism.replicas %d needs a stateSharding other than None: with None, every data-parallel rank is a"
        " replica; remove stateSharding, or remove replicas",
        "p.parallelism.replicas",
    ),
    on_each_phase(
        "p.parallelism.expertRanks == 1 || has(self.model.experts)",
        ".parallelism.expertRanks %d spreads the experts of layers, but spec.model has no experts; set"
        " spec.model.experts, or remove expertRanks",
        "p.parallelism.expertRanks",
    ),
    on_each_phase(
        "has(p.experts) || !has(self.model.experts) || self.model.experts.count % p.parallelism.expertRanks == 0",
        ".parallelism.expertRanks %d must divide spec.model.experts.count %d",
        "p.parallelism.expertRanks",
        "self.model.experts.count",
    ),
    on_each_phase(
        "p.parallelism.contextRanks == 1 || self.model.sequenceLength % (2 * p.parallelism.contextRanks) == 0",
        ".parallelism.contextRanks %d cuts each sequence into twice as many equal chunks, and spec.model.sequenceLength"
        " %d has no such chunks; change one of them",
        "p.parallelism.contextRanks",
        "self.model.sequenceLength",
    ),
    on_each_phase(
        "p.parallelism.contextRanks == 1 || !has(self.model.experts) || (has(self.model.experts.topK)"
        " && (self.model.experts.topK.balanceOver == 'Step' || double(self.model.experts.topK.auxiliaryLoss) == 0.0))",
        ".parallelism.contextRanks %d cuts sequences, but spec.model.experts counts the tokens of whole sequences, for"
        " capacityFactor or for auxiliaryLoss; set experts.type TopK, and topK.balanceOver Step with an auxiliaryLoss,"
        " or remove contextRanks",
        "p.parallelism.contextRanks",
    ),
    on_each_phase(
        "!has(self.model.experts) || !has(self.model.experts.topK) || self.model.experts.topK.balanceOver == 'Sequence'"
        " || p.parallelism.schedule in ['Layered', 'GPipe'] || p.batch.microBatches == 1",
        ".parallelism.schedule %s starts backward passes of a layer before all micro-batches are routed to experts, but"
        " spec.model.experts.topK.balanceOver %s needs the routing of the whole step; set schedule Layered or GPipe,"
        " batch.microBatches 1, or balanceOver Sequence",
        "p.parallelism.schedule",
        "self.model.experts.topK.balanceOver",
    ),
    on_each_phase(
        "p.offload.expertGroups == 1 || has(self.model.experts)",
        ".offload.expertGroups %d cuts the experts of a layer into groups, but spec.model has no experts; set"
        " spec.model.experts, or remove expertGroups",
        "p.offload.expertGroups",
    ),
    on_each_phase(
        "has(p.experts) || !has(self.model.experts) || p.offload.expertGroups == 1"
        " || self.model.experts.count % (p.parallelism.expertRanks * p.offload.expertGroups) == 0",
        ".offload.expertGroups %d must divide the experts of a rank: spec.model.experts.count %d over"
        " parallelism.expertRanks %d",
        "p.offload.expertGroups",
        "self.model.experts.count",
        "p.parallelism.expertRanks",
    ),
    on_each_phase(
        "p.offload.expertGroups == 1 || p.parallelism.schedule == 'Layered'",
        ".offload.expertGroups %d needs parallelism.schedule Layered, and it is %s: in other schedules each group would"
        " be fetched for every micro-batch; change the schedule, or remove expertGroups",
        "p.offload.expertGroups",
        "p.parallelism.schedule",
    ),
    on_each_phase(
        "p.offload.expertGroups == 1 || self.optimizer.clipping.mode == 'Global'"
        " || (self.optimizer.clipping.mode == 'None' && self.optimizer.nonFinite == 'Fail')",
        ".offload.expertGroups %d needs spec.optimizer.clipping.mode Global, or None with nonFinite Fail, and they"
        " are %s and %s: otherwise each group would be clipped or skipped by itself, and training would differ"
        " from training without groups",
        "p.offload.expertGroups",
        "self.optimizer.clipping.mode",
        "self.optimizer.nonFinite",
    ),
    on_each_phase(
        "p.activations.sequenceChunks == 1 || (p.activations.keep == 'Inputs' && p.compile.mode == 'None')",
        ".activations.sequenceChunks %d needs activations.keep Inputs and compile.mode None, but they are %s and %s: a"
        " layer in chunks is recomputed chunk by chunk; change them, or remove sequenceChunks",
        "p.activations.sequenceChunks",
        "p.activations.keep",
        "p.compile.mode",
    ),
    on_each_phase(
        "p.activations.home == 'Device' || p.activations.keep == 'Inputs'",
        ".activations.home %s needs activations.keep Inputs, but it is %s: only inputs of blocks can be in host memory",
        "p.activations.home",
        "p.activations.keep",
    ),
    on_each_phase(
        "p.compile.mode == 'None' || p.activations.keep != 'Products'",
        ".compile.mode %s needs activations.keep Inputs or All, but it is Products: torch.compile decides which"
        " activations are recomputed; set keep All",
        "p.compile.mode",
    ),
    on_each_phase(
        "!has(p.elastic) || p.elastic.minWorkers < p.workers",
        ".elastic.minWorkers %d must be less than workers %d; lower it, or remove elastic",
        "p.elastic.minWorkers",
        "p.workers",
    ),
    on_each_phase(
        "p.spares == 0 || !has(p.elastic)",
        (
            ".spares %d and elastic exclude each other: an elastic phase continues with fewer workers; remove one"
            " of the two"
        ),
        "p.spares",
    ),
    on_each_phase(
        "p.spares == 0 || p.workers > 1",
        ".spares %d needs at least 2 workers: if the only worker is lost, no worker can continue; remove spares",
        "p.spares",
    ),
    on_each_phase(
        "p.spares == 0 || self.restart.inPlace > 0",
        ".spares %d needs spec.restart.inPlace of at least 1: the other pods restart their ranks in place; raise"
        " it, or remove spares",
        "p.spares",
    ),
    on_each_phase(
        "!has(p.offload.budget) || (p.offload.home == 'Device' && size(p.offload.homes) == 0)",
        ".offload.budget chooses the homes, but offload.home is %s and offload.homes has %d entries;"
        " remove budget, or remove home and homes",
        "p.offload.home",
        "size(p.offload.homes)",
    ),
    on_each_phase(
        "p.batch.sequences % p.batch.microBatches == 0",
        ".batch.microBatches %d must divide sequences %d",
        "p.batch.microBatches",
        "p.batch.sequences",
    ),
    on_each_phase(
        "has(p.until.step) || has(p.until.tokens)",
        ".until has neither step nor tokens; set one, so that the phase ends even if no other bound is reached",
    ),
    on_each_phase(
        f"has(p.layers) || !has(p.until.gradientCorrelation) || {blocks_of('p')} < self.model.layers",
        ".until.gradientCorrelation compares layers that share a block, but the phase has %d blocks for"
        " spec.model.layers %d; remove it or lower sharing.blocks",
        blocks_of("p"),
        "self.model.layers",
    ),
    on_each_phase(
        "!has(p.until.gradientCorrelation) || double(p.until.gradientCorrelation.below) <= 1.0",
        ".until.gradientCorrelation.below %s must be at most 1, as it is a cosine",
        "p.until.gradientCorrelation.below",
    ),
    on_each_pair(
        f"has({{p}}.layers) || {_REFINES}",
        ".sharing must refine the sharing of phase %s: its %d blocks must be a multiple of %d, in the same pattern",
        "{p}.name",
        _BLOCKS_Q,
        _BLOCKS_P,
    ),
    on_each_pair(
        f"has({{p}}.layers) || !{_EXPERTS_P} || {_EXPERTS_Q} || {_BLOCKS_Q} == self.model.layers",
        ".sharing must refine the sharing of phase %s, whose layers share only experts; set sharing.parts to [Experts],"
        " or remove sharing",
        "{p}.name",
    ),
    on_each_pair(
        "(!has({p}.until.step) || !has({q}.until.step) || {p}.until.step < {q}.until.step)",
        ".until.step %d must be greater than the %d of phase %s: steps count from the start of the job",
        "{q}.until.step",
        "{p}.until.step",
        "{p}.name",
    ),
    on_each_pair(
        "(!has({p}.until.tokens) || !has({q}.until.tokens) || {p}.until.tokens < {q}.until.tokens)",
        ".until.tokens %d must be greater than the %d of phase %s: tokens count from the start of the job",
        "{q}.until.tokens",
        "{p}.until.tokens",
        "{p}.name",
    ),
)
