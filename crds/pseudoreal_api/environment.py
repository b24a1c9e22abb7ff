"""Environment variables of the trainer container reserved for the operator and torchrun."""

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


def is_reserved(variable: str) -> bool:
    """Return whether only the operator or torchrun may set the variable."""
    return variable in RESERVED_ENV or variable.startswith(RESERVED_ENV_PREFIXES)
