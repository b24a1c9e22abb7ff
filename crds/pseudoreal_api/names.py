"""Deterministic names and labels of a job's children, and the paths inside its pods."""

from pseudoreal_api.base import GROUP

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_PHASE = f"{GROUP}/phase"
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""1, and one more with each restart after a fault."""
LABEL_EXECUTION_ATTEMPT = f"{GROUP}/execution-attempt"
"""Of every set of pods its own; the one that the names have."""
LABEL_ROLE = f"{GROUP}/role"

ANNOTATION_FINISH_PHASE = f"{GROUP}/finish-phase"
"""Names a phase that is to end now, through a committed checkpoint."""

CONTAINER = "trainer"
CONFIG_DIRECTORY = "/etc/pseudoreal"
CONFIG_FILE = "config.json"
OFFLOAD_DIRECTORY = "/offload"
WORK_DIRECTORY = "/scratch"
"""Of jobs whose checkpoints are in object storage."""
NCCL_CONFIG_FILE = "nccl.conf"
REPORT_CA_FILE = "operator-ca.crt"
REPORT_TOKEN_DIRECTORY = "/var/run/secrets/pseudoreal.dev"
REPORT_TOKEN_FILE = "token"
RENDEZVOUS_PORT = 29500


def train_name(job: str, phase: str, attempt: int) -> str:
    """Name of the Indexed Job, the headless Service and the ConfigMap of one attempt at a phase."""
    return f"{job}-{phase}-a{attempt}"


def delink_name(job: str, phase: str, attempt: int) -> str:
    """Name of the Job and the ConfigMap of one attempt at the delink that leads into `phase`."""
    return f"{job}-{phase}-delink-a{attempt}"


def work_folder(job: str, uid: str) -> str:
    """Name of a job's folder below spec.checkpoint.path. A job that is deleted and created anew gets a new one."""
    return f"{job}-{uid[:8]}"


def work_directory(checkpoint_path: str, job: str, uid: str) -> str:
    """Folder of one job, on its volume or in object storage."""
    return f"{checkpoint_path.rstrip('/')}/{work_folder(job, uid)}"


def claim_name(job: str) -> str:
    """Name of the PersistentVolumeClaim that is made for a job."""
    return f"{job}-checkpoints"
