"""Sink for Weights & Biases runs."""

from pathlib import Path

from pseudoreal_api.resolved.config import JobIdentity
from pseudoreal_api.spec.logging import WeightsAndBiases as Spec

from pseudoreal_trainer.training.sinks.sink import Figures, Texts

PACKAGE = "wandb"


class WeightsAndBiases:
    """Weights & Biases run of the job, identified by the job's uid.

    The service accepts each step once. Training a step again after a fault gives the same figures, so nothing is lost.
    """

    def __init__(self, spec: Spec, job: JobIdentity, work_directory: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=job.uid,
            name=job.name,
            mode="offline" if spec.mode == "Offline" else "online",
            dir=str(work_directory),
            resume="allow",
        )

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        import wandb

        tables = {name: wandb.Table(columns=["text"], data=[[text]]) for name, text in texts.items()}
        self._run.log({**figures, **tables}, step=step)

    def close(self) -> None:
        self._run.finish()
