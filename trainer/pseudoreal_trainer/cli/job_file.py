"""The PseudoRealJobs in a file, checked with the API server's rules; each fault has its line and column."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.base import KIND
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.resolved.resolve import UnresolvableJob
from pseudoreal_api.spec.check import InvalidJob, check_job
from pseudoreal_api.spec.job import PseudoRealJob

from pseudoreal_trainer.cli.common import CommandError, ExitStatus
from pseudoreal_trainer.cli.yaml_positions import Document, Fault, UnreadableYaml, read_documents
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.hub import SCHEME, is_dataset, is_pinned

_STDIN = Path("-")


@dataclass(frozen=True)
class JobFile:
    """Jobs of a file, and the kinds of the file's other objects. `name`: file name shown with faults."""

    name: str
    jobs: list[Document]
    others: list[str]

    def faults(self) -> list[str]:
        """Return all faults of the jobs as lines with file, line and column."""
        return [fault.text(self.name) for job in self.jobs for fault in faults_of(job)]


def parse_job(path: Path) -> PseudoRealJob:
    """Return the file's only job, checked; - is standard input. Raises CommandError."""
    return check_job(only_job(read_job_file(path)).body)


def read_job_file(path: Path) -> JobFile:
    """Read the file; - is standard input. Raises CommandError if the text is not YAML or has no job."""
    name, text = _read(path)
    return job_file_of(text, name)


def job_file_of(text: str, name: str) -> JobFile:
    """Return the jobs of a text; `name` stands for its file. Raises CommandError if it is not YAML or has no job."""
    try:
        documents = read_documents(text)
    except UnreadableYaml as error:
        raise invalid([fault.text(name) for fault in error.faults]) from error
    kinds = [document.body.get("kind") if isinstance(document.body, dict) else None for document in documents]
    jobs = [document for document, kind in zip(documents, kinds, strict=True) if kind == KIND]
    if not jobs:
        raise CommandError(f"{name} holds no object of kind {KIND}", ExitStatus.INVALID_JOB)
    return JobFile(name, jobs, [str(kind or "no kind") for kind in kinds if kind != KIND])


def only_job(file: JobFile) -> Document:
    """Return the file's only job. Raises CommandError if there are several, or if the job has faults."""
    if len(file.jobs) > 1:
        raise CommandError(
            f"{file.name} holds {len(file.jobs)} objects of kind {KIND}; write each into a file of its own",
            ExitStatus.INVALID_JOB,
        )
    faults = file.faults()
    if faults:
        raise invalid(faults)
    return file.jobs[0]


def faults_of(document: Document) -> list[Fault]:
    """Return the faults of a job, in file order."""
    return sorted(map(document.fault, _sentences(document.body)), key=lambda fault: (fault.line, fault.column))


def invalid(faults: list[str]) -> CommandError:
    return CommandError("\n".join(faults), ExitStatus.INVALID_JOB)


def _sentences(body: dict[str, Any]) -> Iterator[str]:
    try:
        job = check_job(body)
        check_resolvable(job.spec)
    except (InvalidJob, UnresolvableJob) as error:
        yield from str(error).splitlines()
    else:
        yield from _unpinned_weights(job)


def _unpinned_weights(job: PseudoRealJob) -> Iterator[str]:
    """Yield a sentence if the job starts from weights on the hub that are not pinned. The API server accepts the job;
    its first pod ends with an error."""
    start = job.spec.checkpoint.start_from
    path = start.hugging_face.path if start is not None and start.hugging_face is not None else ""
    if not path.startswith(SCHEME):
        return
    try:
        is_fixed = not is_dataset(path) and is_pinned(path)
    except InvalidJobError as error:
        yield f"spec.checkpoint.startFrom.huggingFace.path: {error}"
        return
    if not is_fixed:
        yield (
            f"spec.checkpoint.startFrom.huggingFace.path: {path} is not pinned, and weights must not change between two"
            " executions; give hf://OWNER/NAME@COMMIT, with a commit of 40 hexadecimal digits"
        )


def _read(path: Path) -> tuple[str, str]:
    if path == _STDIN:
        return "standard input", sys.stdin.read()
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}", ExitStatus.INVALID_JOB) from error
