"""Deterministic names, labels and annotations of a job's children, and the paths inside its pods."""

from base64 import b32encode
from hashlib import sha256

from pseudoreal_api.base import GROUP

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_PHASE = f"{GROUP}/phase"
LABEL_EXECUTION = f"{GROUP}/execution"
"""Label with the number of a set of pods, unlike every other's; the names of Jobs and pods end in it."""
LABEL_STAGE = f"{GROUP}/stage"
"""Label that says what a set of pods does: train or delink."""

ANNOTATION_LAST_STEPS = f"{GROUP}/last-steps"
"""Annotation of a Job: the steps at which its phase and the job end at the latest, as PHASE/JOB."""
ANNOTATION_EXCLUDES_UNTIL = f"{GROUP}/excludes-until"
"""Annotation of a Job whose pods must not get nodes that have just rejected pods: the time until which it may wait for
others."""

CONTAINER = "trainer"
CONFIG_DIRECTORY = "/etc/pseudoreal"
CONFIG_FILE = "config.json"
OFFLOAD_DIRECTORY = "/offload"
WORK_DIRECTORY = "/scratch"
"""Work directory in the pods of jobs whose checkpoints are in object storage."""
NCCL_CONFIG_FILE = "nccl.conf"
REPORT_CA_FILE = "operator-ca.crt"
REPORT_TOKEN_DIRECTORY = "/var/run/secrets/pseudoreal.dev"
REPORT_TOKEN_FILE = "token"
RENDEZVOUS_PORT = 29500
RENDEZVOUS_SECRET = "PSEUDOREAL_RENDEZVOUS_SECRET"
"""Environment variable of a trainer pod that meets others: the file with the secret by which they know each other."""
RENDEZVOUS_SECRET_DIRECTORY = "/var/run/secrets/rendezvous.pseudoreal.dev"
RENDEZVOUS_SECRET_FILE = "secret"
"""Name of that file, and the key in the Secret."""
SECRET_BYTES = 32
"""Size of that secret: what the operator draws, and the least that a trainer takes."""


HOST_NAME_CHARACTERS = 63
"""Most characters in a label of a host name (RFC 1123)."""
_DIGEST_CHARACTERS = 6


def execution_name(job: str, uid: str, phase: str, stage: str, number: int) -> str:
    """Name of the Indexed Job of one execution; its pods' host names append -INDEX.

    A name of a job or a phase may hold any part of another one, so a digest of all that the Job is for tells them
    apart. What people read before it is cut where it is too long.
    """
    title = f"{job}-{phase}" if stage == "train" else f"{job}-{phase}-{stage}"
    end = f"-{_digest(uid, phase, stage)}-e{number}"
    return title[: HOST_NAME_CHARACTERS - len(f"{end}-9999")].rstrip("-") + end


def network_name(job: str, uid: str) -> str:
    """Name of the headless Service and the NetworkPolicy of a job: one for all its executions."""
    return f"{job}-{_digest(uid)}"


def gang_name(job: str, uid: str, phase: str, terms: str) -> str:
    """Name of the PodGroup of a phase, the same for all its executions. `terms` are what else it says: one that says
    something else has another name, as none is ever changed."""
    end = f"-{_digest(uid, phase, terms)}"
    return f"{job}-{phase}"[: HOST_NAME_CHARACTERS - len(end)].rstrip("-") + end


def _digest(*parts: str) -> str:
    # No part but the last has a slash in it.
    return b32encode(sha256("/".join(parts).encode()).digest())[:_DIGEST_CHARACTERS].decode().lower()


def file_annotation(file: str) -> str:
    """The annotation of a pod that is mounted as `file` in CONFIG_DIRECTORY."""
    return f"{GROUP}/{file}"


def work_folder(job: str, uid: str) -> str:
    """Name of a job's folder in spec.checkpoint.storage. A job that is deleted and created anew gets a new one."""
    return f"{job}-{uid[:8]}"


def work_directory(storage: str, job: str, uid: str) -> str:
    """Folder of one job below the mount path of its volume, or below its URL in object storage."""
    return f"{storage.rstrip('/')}/{work_folder(job, uid)}"


def claim_name(job: str) -> str:
    """Name of the PersistentVolumeClaim that is made for a job."""
    return f"{job}-checkpoints"
