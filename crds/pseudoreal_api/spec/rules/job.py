"""Rules on a job's storage, operation, pods and name; and all rules on a job, in the order of the policy."""

from pseudoreal_api.names import HOST_NAME_CHARACTERS, RESERVED_ENV, RESERVED_ENV_PREFIXES
from pseudoreal_api.spec.rules.model import MODEL_RULES
from pseudoreal_api.spec.rules.rule import Rule, on_each_phase, on_job, says
from pseudoreal_api.spec.rules.training import TRAINING_RULES, blocks_of

_NAMED_CLAIM = "(has(self.checkpoint.storage.volume) && has(self.checkpoint.storage.volume.claimName))"
_OBJECTS = "self.checkpoint.storage.objectStorage"
_START = "self.checkpoint.startFrom"
_FIRST_BLOCKS = blocks_of("self.phases[0]")

_ONE_LIST = "[size(r.onExitCodes), size(r.onPodConditions), size(r.onReasons)].exists_one(n, n > 0)"
_DESCRIBED = "has(s.weightsAndBiases) == (s.type == 'WeightsAndBiases') && has(s.mlflow) == (s.type == 'MLflow')"

_RESERVED = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_IS_RESERVED = " || ".join(
    [f"e.name in [{_RESERVED}]"] + [f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
)
_ONE_VALUE = "has(e.value) != has(e.valueFrom)"

_OPERATION_RULES = (
    # Mounts and storage: corpus, checkpoints, initial weights.
    on_job(
        "!has(self.data.volume) || self.data.path.startsWith('/')",
        "spec.data.path %s must be absolute, as spec.data.volume is mounted there",
        "self.data.path",
    ),
    on_job(
        "self.checkpoint.storage.type == 'Volume' || has(self.checkpoint.storage.objectStorage)",
        "spec.checkpoint.storage.type %s needs spec.checkpoint.storage.objectStorage; set it",
        "self.checkpoint.storage.type",
    ),
    on_job(
        "self.checkpoint.storage.type == 'Volume' ? !has(self.checkpoint.storage.objectStorage)"
        " : !has(self.checkpoint.storage.volume)",
        "spec.checkpoint.storage.type is %s, but the field of the other type is set; remove this field, or change the"
        " type",
        "self.checkpoint.storage.type",
    ),
    on_job(
        f"!has({_OBJECTS}) || !has({_OBJECTS}.endpoint) || {_OBJECTS}.url.startsWith('s3:')",
        "spec.checkpoint.storage.objectStorage.endpoint %s is for s3:// only, but url is %s; remove endpoint",
        f"{_OBJECTS}.endpoint",
        f"{_OBJECTS}.url",
    ),
    on_job(
        f"!has({_OBJECTS}) || !has({_OBJECTS}.credentialsSecretName) || !{_OBJECTS}.url.startsWith('gs:')",
        "spec.checkpoint.storage.objectStorage.credentialsSecretName %s is not for gs://, where a key is a file; remove"
        " it, and give the pods a service account with access, or mount the file and set GOOGLE_APPLICATION_CREDENTIALS"
        " in spec.pod.env to its path",
        f"{_OBJECTS}.credentialsSecretName",
    ),
    on_job(
        f"!{_NAMED_CLAIM} || !has(self.checkpoint.storage.volume.claimTemplate)",
        "spec.checkpoint.storage.volume has both claimName %s and claimTemplate; keep claimName for an existing claim,"
        " or claimTemplate for a new claim",
        "self.checkpoint.storage.volume.claimName",
    ),
    on_job(
        f"!{_NAMED_CLAIM} || self.checkpoint.storage.volume.retentionPolicy == 'Retain'",
        "spec.checkpoint.storage.volume.retentionPolicy %s is for a claim that the operator creates, but claimName %s"
        " names an existing claim; remove one of these fields",
        "self.checkpoint.storage.volume.retentionPolicy",
        "self.checkpoint.storage.volume.claimName",
    ),
    on_job(
        f"!has({_START}) || has({_START}.huggingFace)",
        "spec.checkpoint.startFrom.type %s needs spec.checkpoint.startFrom.huggingFace; set it",
        f"{_START}.type",
    ),
    on_job(
        f"!has({_START}) || !has(self.checkpoint.continueFrom)",
        "spec.checkpoint.continueFrom is %s, and spec.checkpoint.startFrom names other weights to begin with; remove"
        " one of them",
        "self.checkpoint.continueFrom",
    ),
    on_job(
        f"!has({_START}) || !has({_START}.huggingFace) || !has({_START}.huggingFace.volume)"
        f" || {_START}.huggingFace.path.startsWith('/')",
        "spec.checkpoint.startFrom.huggingFace.path %s must be absolute, as"
        " spec.checkpoint.startFrom.huggingFace.volume is mounted there",
        f"{_START}.huggingFace.path",
    ),
    on_job(
        f"!has({_START}) || ({_START}.blocks.type == 'Listed') == (size({_START}.blocks.layers) > 0)",
        "spec.checkpoint.startFrom.blocks.type is %s; set spec.checkpoint.startFrom.blocks.layers with type Listed, and"
        " only then",
        f"{_START}.blocks.type",
    ),
    on_job(
        f"!has({_START}) || {_START}.blocks.layers.all(l, l < self.model.layers)",
        "spec.checkpoint.startFrom.blocks.layers: there is no layer %d, as spec.model.layers is %d and the first layer"
        " is 0",
        f"{_START}.blocks.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || {_FIRST_BLOCKS} < self.model.layers",
        "spec.checkpoint.startFrom.blocks.layers: the phase %s shares no blocks, so each layer starts from the layer of"
        " the same index; remove spec.checkpoint.startFrom.blocks",
        "self.phases[0].name",
    ),
    on_job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || size({_START}.blocks.layers) == {_FIRST_BLOCKS}",
        "spec.checkpoint.startFrom.blocks.layers has %d layers, and the phase %s has %d blocks; list a layer per block",
        f"size({_START}.blocks.layers)",
        "self.phases[0].name",
        _FIRST_BLOCKS,
    ),
    # Queue and gang, metrics sinks, restarts, hangs, requests.
    *(
        on_job(
            f"has(self.scheduling.queue) || !{is_set}",
            f"spec.scheduling.{field} needs scheduling.queue (the label of Kueue is not enough); set queue, or remove"
            f" {field}",
        )
        for field, is_set in (
            ("queueDelink", "self.scheduling.queueDelink"),
            ("workloadPriorityClassName", "has(self.scheduling.workloadPriorityClassName)"),
        )
    ),
    on_job(
        "!has(self.scheduling.gang.timeoutSeconds) || self.scheduling.gang.policy == 'SchedulerPlugins'",
        "spec.scheduling.gang.timeoutSeconds is for policy SchedulerPlugins only, but gang.policy is %s; remove it, and"
        " set spec.deadlines.startupSeconds to release pods if not all of them run",
        "self.scheduling.gang.policy",
    ),
    on_job(
        "!has(self.scheduling.topology) ||"
        " has(self.scheduling.topology.required) != has(self.scheduling.topology.preferred)",
        "spec.scheduling.topology needs either required or preferred, with the key of a label of nodes; set one of"
        " them",
    ),
    on_job(
        f"self.logging.sinks.all(s, {_DESCRIBED})",
        "spec.logging.sinks: the sink of type %s lacks the field of its type, or has another; set weightsAndBiases for"
        " WeightsAndBiases, mlflow for MLflow, neither for TensorBoard",
        f"self.logging.sinks.filter(s, !({_DESCRIBED}))[0].type",
    ),
    on_job(
        f"self.restart.rules.all(r, {_ONE_LIST})",
        "spec.restart.rules: the rule with the action %s needs exactly one of onExitCodes, onPodConditions, onReasons",
        f"self.restart.rules.filter(r, !({_ONE_LIST}))[0].action",
    ),
    on_job(
        "!has(self.restart.windowSeconds) || self.restart.maxRestarts <= 100",
        "spec.restart.maxRestarts %d must be at most 100 with spec.restart.windowSeconds: status.faults keeps at most"
        " 100 faults",
        "self.restart.maxRestarts",
    ),
    on_job(
        "double(self.hang.stragglerFactor) > 1.0",
        "spec.hang.stragglerFactor %s must be greater than 1",
        "self.hang.stragglerFactor",
    ),
    on_job(
        "self.requests.all(r, self.phases.exists(p, p.name == r.phase))",
        "spec.requests[%s].phase %s is none of spec.phases; name one of them",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].id",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].phase",
    ),
    # Pods: network and environment.
    on_job(
        "self.network.mode != 'RDMA' || has(self.network.rdmaResource) || self.network.hostNetwork",
        "spec.network.mode %s needs adapters in the pods; set network.rdmaResource to the resource of an"
        " RDMA device plugin, or network.hostNetwork",
        "self.network.mode",
    ),
    on_job(
        f"self.pod.env.all(e, !({_IS_RESERVED}))",
        "spec.pod.env: the name %s is reserved for the operator; remove it",
        f"self.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    on_job(
        f"self.pod.env.all(e, {_ONE_VALUE})",
        "spec.pod.env[%s] needs either value or valueFrom; set one of them",
        f"self.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
    on_each_phase(
        f"p.pod.env.all(e, !({_IS_RESERVED}))",
        ".pod.env: the name %s is reserved for the operator; remove it",
        f"p.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    on_each_phase(
        f"p.pod.env.all(e, {_ONE_VALUE})",
        ".pod.env[%s] needs either value or valueFrom; set one of them",
        f"p.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
)

SPEC_RULES = (*MODEL_RULES, *TRAINING_RULES, *_OPERATION_RULES)
"""Rules on the spec. Their order is that of the sentences that a user sees."""

# Jobs are named <job>-<phase>-<digest>-e<execution>; host names of their pods append -<index> and must be DNS labels of
# at most 63 characters. The names of delinks are longer and are cut.
NAME_BUDGET = HOST_NAME_CHARACTERS - len("--abcdef-e999-9999")

_TOO_LONG = f"size(self.metadata.name) + size(p.name) > {NAME_BUDGET}"
METADATA_RULES = (
    Rule(
        f"self.spec.phases.all(p, !({_TOO_LONG}))",
        f"self.spec.phases.filter(p, {_TOO_LONG}).map(p, "
        + says(
            "metadata.name %s and the phase name %s have %d characters together;"
            f" at most {NAME_BUDGET} fit into the host names of the pods",
            "self.metadata.name",
            "p.name",
            "size(self.metadata.name) + size(p.name)",
        )
        + ")[0]",
    ),
    on_job(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name %s must begin with a letter and have no dots: it becomes part of host names",
        "self.metadata.name",
    ),
)
