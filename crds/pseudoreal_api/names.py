"""Deterministic names, labels and annotations of a job's children, and paths inside its pods."""

from base64 import b32encode
from hashlib import sha256

from pseudoreal_api.base import GROUP

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_PHASE = f"{GROUP}/phase"
LABEL_EXECUTION = f"{GROUP}/execution"
"""Label with the number of an execution, unique within the job; names of Jobs and pods end with it."""
LABEL_STAGE = f"{GROUP}/stage"
"""Label with the stage of an execution: train or delink."""

ANNOTATION_LAST_STEPS = f"{GROUP}/last-steps"
"""Annotation of a Job: the last possible steps of its phase and of the job, as PHASE/JOB."""
ANNOTATION_EXCLUDES_UNTIL = f"{GROUP}/excludes-until"
"""Annotation of a Job with pods that must avoid certain nodes after a rejection: time until which the last of these
nodes is excluded."""

CONTAINER = "trainer"
CONFIG_DIRECTORY = "/etc/pseudoreal"
CONFIG_FILE = "config.json"
OFFLOAD_DIRECTORY = "/offload"
WORK_DIRECTORY = "/scratch"
"""Work directory in the pods of jobs with checkpoints in object storage."""
NCCL_CONFIG_FILE = "nccl.conf"
REPORT_CA_FILE = "operator-ca.crt"
REPORT_TOKEN_DIRECTORY = "/var/run/secrets/pseudoreal.dev"
REPORT_TOKEN_FILE = "token"
RENDEZVOUS_PORT = 29500
RENDEZVOUS_SECRET = "PSEUDOREAL_RENDEZVOUS_SECRET"
"""Environment variable of a trainer pod in a rendezvous: path of the file with the secret shared by the job's pods."""
RENDEZVOUS_SECRET_DIRECTORY = "/var/run/secrets/rendezvous.pseudoreal.dev"
RENDEZVOUS_SECRET_FILE = "secret"
"""Name of the secret's file, and its key in the Secret."""
SECRET_BYTES = 32
"""Length of the secret in bytes. The operator generates secrets of this length; a trainer accepts longer ones, too."""

RESERVED_ENV = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "JOB_COMPLETION_INDEX",
)
RESERVED_ENV_PREFIXES = ("PET_", "PSEUDOREAL_", "TORCHELASTIC_")
"""Environment variables of the trainer container that only the operator and torchrun set."""

HOST_NAME_CHARACTERS = 63
"""Maximum number of characters in a label of a host name (RFC 1123)."""
_DIGEST_CHARACTERS = 6


def execution_name(job: str, uid: str, phase: str, stage: str, number: int) -> str:
    """Return the name of the Indexed Job of one execution; its pods' host names append -INDEX.

    Job and phase names can contain each other as parts, so a digest of the uid, phase and stage makes the name unique.
    The readable part before the digest is cut if the name is too long.
    """
    title = f"{job}-{phase}" if stage == "train" else f"{job}-{phase}-{stage}"
    end = f"-{_digest(uid, phase, stage)}-e{number}"
    return title[: HOST_NAME_CHARACTERS - len(f"{end}-9999")].rstrip("-") + end


def network_name(job: str, uid: str) -> str:
    """Return the name of a job's headless Service and NetworkPolicy, shared by all its executions."""
    return f"{job}-{_digest(uid)}"


def gang_name(job: str, uid: str, phase: str, terms: str) -> str:
    """Return the name of a phase's PodGroup, the same for all its executions.

    `terms`: text with the parameters of the gang, such as its timeout. A PodGroup is never changed: other terms give
    another name.
    """
    end = f"-{_digest(uid, phase, terms)}"
    return f"{job}-{phase}"[: HOST_NAME_CHARACTERS - len(end)].rstrip("-") + end


def _digest(*parts: str) -> str:
    # Only the last part can contain a slash, so joined parts cannot be confused.
    return b32encode(sha256("/".join(parts).encode()).digest())[:_DIGEST_CHARACTERS].decode().lower()


def file_annotation(file: str) -> str:
    """Return the pod annotation mounted as `file` in CONFIG_DIRECTORY."""
    return f"{GROUP}/{file}"


def work_folder(job: str, uid: str) -> str:
    """Return the name of a job's folder in spec.checkpoint.storage. A deleted and recreated job gets a new one."""
    return f"{job}-{uid[:8]}"


def work_directory(storage: str, job: str, uid: str) -> str:
    """Return the folder of one job below the mount path of its volume, or below its URL in object storage."""
    return f"{storage.rstrip('/')}/{work_folder(job, uid)}"


def claim_name(job: str) -> str:
    """Return the name of the PersistentVolumeClaim created for a job."""
    return f"{job}-checkpoints"


def is_reserved_variable(variable: str) -> bool:
    """Return whether only the operator or torchrun may set the variable."""
    return variable in RESERVED_ENV or variable.startswith(RESERVED_ENV_PREFIXES)
