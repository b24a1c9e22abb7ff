"""A job as Python sees it: the contract's models, and what can be done with a job without a cluster."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.resolve import UnresolvableJob
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_trainer.cli.common import CommandError
from pseudoreal_trainer.cli.job_file import JobFile, job_file_of, only_job, read_job_file
from pseudoreal_trainer.cli.yaml_scalars import Dumper
from pydantic import Field, PrivateAttr, ValidationError

from pseudoreal.errors import Unreadable
from pseudoreal.observed_job import one_line

if TYPE_CHECKING:
    from pseudoreal_trainer.estimate.report import PhaseReport

    from pseudoreal.run import Run

Json = dict[str, Any]
_OF_THE_CLUSTER = {"uid", "generation"}
"""Fields of metadata that the API server writes."""


class Job(PseudoRealJob):
    """A PseudoRealJob: what to train (`spec`), its name (`metadata`), and how far it is (`status`).

    Jobs cannot be changed; `model_copy(update=...)` makes changed ones.

    >>> job = Job.from_yaml("examples/laptop.yaml")
    >>> job.spec.model.layers, [phase.name for phase in job.spec.phases]
    (8, ['pseudo', 'real'])
    >>> job.validate()
    """

    status: PseudoRealJobStatus = Field(default_factory=PseudoRealJobStatus)
    _folder: Path = PrivateAttr(default_factory=Path)
    """Folder that relative paths of the job start from, when it runs on this machine."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> "Job":
        """Return the job of an object as the API server returns it. Raises Unreadable if it is of another release."""
        parts = {"metadata": body["metadata"], "spec": body["spec"], "status": body.get("status") or {}}
        try:
            return cls.model_validate(parts)
        except ValidationError as error:
            name, namespace = body["metadata"]["name"], body["metadata"].get("namespace")
            raise Unreadable(
                f"job {name} in namespace {namespace} is not of this release: {one_line(str(error))}; `pseudoreal"
                f" describe {name} -n {namespace}` shows it"
            ) from error

    @classmethod
    def from_yaml(cls, source: str | Path) -> "Job":
        """Read the only job of a file, or of a YAML text. A str with a line break is a text.

        Raises InvalidJob with file, line and column of each fault.
        """
        is_text = isinstance(source, str) and "\n" in source
        try:
            file: JobFile = job_file_of(str(source), "text") if is_text else read_job_file(Path(source))
            document = only_job(file)
        except CommandError as error:
            raise InvalidJob(error.message) from None
        checked = check_job(document.body)
        job = cls(metadata=checked.metadata, spec=checked.spec)
        job._folder = Path() if is_text else Path(source).resolve().parent
        return job

    def to_object(self) -> Json:
        """Return the job as JSON for the API server: the fields that were given, without the status."""
        given = self.model_dump(
            mode="json",
            by_alias=True,
            exclude_none=True,
            exclude_unset=True,
            exclude={"status": True, "metadata": _OF_THE_CLUSTER},
        )
        return {"apiVersion": API_VERSION, "kind": KIND} | given

    def to_yaml(self) -> str:
        """Return the job as YAML, which `kubectl apply -f` and `pseudoreal run` read."""
        return yaml.dump(self.to_object(), Dumper=Dumper, sort_keys=False, allow_unicode=True)

    def validate(self) -> None:  # type: ignore[override]  # pydantic's own has been deprecated since its version 2
        """Check the job with the cluster's rules. Raises InvalidJob with a sentence for each fault.

        >>> job = Job.from_yaml("examples/laptop.yaml")
        >>> phases = [job.spec.phases[0].model_copy(update={"name": "real"}), job.spec.phases[1]]
        >>> job.model_copy(update={"spec": job.spec.model_copy(update={"phases": phases})}).validate()
        Traceback (most recent call last):
        pseudoreal_api.spec.check.InvalidJob: spec.phases[1]: duplicate value real; keep one of them
        """
        try:
            check_resolvable(check_job(self.to_object()).spec)
        except UnresolvableJob as error:
            raise InvalidJob(str(error)) from None

    def plan(self, hardware: str | Path | None = None) -> "list[PhaseReport]":
        """Estimate what each phase needs, as `pseudoreal plan` does. `hardware`: profile of a machine, for seconds.

        Raises InvalidJob for a job or a profile that cannot be planned.

        >>> plan = Job.from_yaml("examples/laptop.yaml").plan()
        >>> [(phase.name, phase.parameters, phase.fits) for phase in plan]
        [('pseudo', 262528, True), ('real', 1640576, True)]
        """
        from pseudoreal_trainer.cli.planning import plan_job
        from pseudoreal_trainer.estimate.time.hardware import read_profile

        self.validate()
        try:
            profile = None if hardware is None else read_profile(Path(hardware))
            return [phase.report for phase in plan_job(self, profile)]
        except ValueError as error:
            raise InvalidJob(str(error)) from error

    def run_locally(
        self,
        workdir: str | Path | None = None,
        *,
        resume: bool = False,
        on_event: Callable[[Json], None] | None = None,
    ) -> "Run":
        """Train the job on this machine, phase after phase, and return the run.

        `workdir`: folder of the run; None: pseudoreal-runs/NAME. `resume` continues the run in it. `on_event` receives
        each line of the trainer's log as it arrives, for instance progress with step and loss. Relative paths start
        from the folder of the file that the job was read from, else from the current folder.

        Must be called in the main thread: an interrupt (Ctrl-C) saves a checkpoint before it ends the run. Raises
        RunFailed, or InvalidJob.
        """
        from pseudoreal.run import run_locally

        self.validate()
        return run_locally(self, self._folder, None if workdir is None else Path(workdir), resume, on_event)
