"""Sink for MLflow runs."""

import time

from pseudoreal_api.resolved.config import JobIdentity
from pseudoreal_api.spec.logging import MLflow as Spec

from pseudoreal_trainer.training.sinks.sink import Figures, Texts

PACKAGE = "mlflow"
_UID, _NAME = "pseudoreal_uid", "mlflow.runName"
_MARK = "train/tokens"
"""Metric present in every step; its history gives the newest logged step."""


class MLflow:
    """MLflow run of the job, found by the job's uid."""

    def __init__(self, spec: Spec, job: JobIdentity) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=spec.url)
        experiment = self._experiment(spec.experiment)
        found = self._client.search_runs([experiment], f"tags.{_UID} = '{job.uid}'")
        run = found[0] if found else self._client.create_run(experiment, tags={_UID: job.uid, _NAME: job.name})
        self._run: str = run.info.run_id
        # a fault or the end of an earlier phase may have ended the run
        self._client.update_run(self._run, status="RUNNING")
        known = self._client.get_metric_history(self._run, _MARK)
        self._newest = max((metric.step for metric in known), default=0)
        """Newest step in the run. Steps up to it are not logged again: training them again after a fault gives the same
        figures."""

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        from mlflow.entities import Metric

        if step <= self._newest:
            return
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [Metric(name, figure, now, step) for name, figure in figures.items()])
        for name, text in texts.items():
            self._client.log_text(self._run, text, f"{name}/{step:08d}.txt")
        self._newest = step

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))
