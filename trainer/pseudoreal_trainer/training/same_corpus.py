"""Checks of the corpus: equal on all ranks, and equal to the corpus at the start of the job."""

import structlog
import torch

from pseudoreal_trainer.checkpoint.origin import Anew, Continued, Origin
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

log = structlog.get_logger()


def agree_on_corpus(identity: CorpusIdentity, ranks: Ranks) -> None:
    """Compare the corpus of all ranks. Collective: every rank calls this.

    Raises TrainingError if a rank has read another corpus than rank 0.
    """
    differs = torch.zeros(ranks.world, dtype=torch.int64, device=ranks.device)
    differs[ranks.rank] = int(ranks.digest_from_first(identity.sha256) != identity.sha256)
    others: list[int] = ranks.sum_(differs).nonzero().flatten().tolist()
    if others:
        raise TrainingError(
            f"rank {others[0]} reads another corpus than rank 0 (rank {ranks.rank} reads {identity}); all pods of a"
            " phase must see the same files: look at spec.data.volume, and whether somebody writes there",
            suspect=None if ranks.rank in others else others[0],
        )


def check_corpus(identity: CorpusIdentity, origin: Origin) -> None:
    """Compare the corpus with the corpus of the origin's checkpoint.

    Raises InvalidJobError if they differ within one job: every sample would change, and training would use text of the
    validation part. After `continueFrom` another job, a different corpus is only logged.
    """
    if isinstance(origin, Anew):
        return
    start = origin.checkpoint.manifest
    before = start.corpus
    if identity.is_same_text(before):
        return
    if isinstance(origin, Continued):
        log.warning("continues_with_another_corpus", checkpoint=start.name, now=str(identity), before=str(before))
        return
    raise InvalidJobError(
        f"the corpus is not the one that checkpoint {start.name} was trained on: it has {identity}, and had"
        f" {before}; restore the files, or train on the new ones in a new job, whose spec.checkpoint.continueFrom"
        " may name this one's folder"
    )
