"""Rules on mounts and storage: corpus, checkpoints, and the initial weights of a job."""

from pseudoreal_api.spec.rules.phases import blocks_of
from pseudoreal_api.spec.rules.rule import on_job

_NAMED_CLAIM = "(has(self.checkpoint.storage.volume) && has(self.checkpoint.storage.volume.claimName))"
_START = "self.checkpoint.startFrom"
_FIRST_BLOCKS = blocks_of("self.phases[0]")

STORAGE_RULES = (
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
        "spec.checkpoint.storage.type is %s, but the storage of the other type is set beside it; remove that, or change"
        " the type",
        "self.checkpoint.storage.type",
    ),
    on_job(
        f"!{_NAMED_CLAIM} || !has(self.checkpoint.storage.volume.claimTemplate)",
        "spec.checkpoint.storage.volume has both claimName %s and claimTemplate; name a claim that exists, or describe"
        " one to be made",
        "self.checkpoint.storage.volume.claimName",
    ),
    on_job(
        f"!{_NAMED_CLAIM} || self.checkpoint.storage.volume.retentionPolicy == 'Retain'",
        "spec.checkpoint.storage.volume.retentionPolicy %s is for a claim that is made for the job, but claimName %s"
        " names one; remove one of them",
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
        "spec.checkpoint.startFrom.blocks.type is %s: Listed needs spec.checkpoint.startFrom.blocks.layers, and no"
        " other type has them",
        f"{_START}.blocks.type",
    ),
    on_job(
        f"!has({_START}) || {_START}.blocks.layers.all(l, l < self.model.layers)",
        "spec.checkpoint.startFrom.blocks.layers: there is no layer %d, as spec.model.layers is %d and the first is 0",
        f"{_START}.blocks.layers.filter(l, l >= self.model.layers)[0]",
        "self.model.layers",
    ),
    on_job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || {_FIRST_BLOCKS} < self.model.layers",
        "spec.checkpoint.startFrom.blocks.layers: the phase %s shares no blocks, so that each layer begins as itself;"
        " remove spec.checkpoint.startFrom.blocks",
        "self.phases[0].name",
    ),
    on_job(
        f"!has({_START}) || size({_START}.blocks.layers) == 0 || size({_START}.blocks.layers) == {_FIRST_BLOCKS}",
        "spec.checkpoint.startFrom.blocks.layers has %d layers, and the phase %s has %d blocks; name a layer for each",
        f"size({_START}.blocks.layers)",
        "self.phases[0].name",
        _FIRST_BLOCKS,
    ),
)
