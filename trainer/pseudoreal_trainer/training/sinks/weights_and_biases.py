"""A run at Weights & Biases."""

from pathlib import Path

from pseudoreal_api.resolved.config import JobIdentity
from pseudoreal_api.spec.logging import WeightsAndBiases as Spec

from pseudoreal_trainer.training.sinks.sink import Figures, Texts

PACKAGE = "wandb"


class WeightsAndBiases:
    """One run for the job, by its uid. The service takes each step once: those that are made anew after a fault are the
    same."""

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
