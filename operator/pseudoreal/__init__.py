"""Python client of pseudoreal: describe jobs, check and plan them, train them here or on a cluster (docs/python.md).

`pseudoreal_client` has the commands for clusters; they call this package.
"""

from pseudoreal_api.spec.check import InvalidJob
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJobSpec
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal.aio import AsyncClient
from pseudoreal.client import Client
from pseudoreal.errors import (
    AlreadyExists,
    ClientError,
    Conflict,
    Forbidden,
    JobDeleted,
    JobEnded,
    JobFailed,
    NamespaceConflict,
    NoCluster,
    NoEffect,
    NotFound,
    NotInstalled,
    Rejected,
    RunFailed,
    Unauthorized,
    Unreachable,
    Unreadable,
    WaitTimeout,
)
from pseudoreal.job import Job
from pseudoreal.metrics import read_metrics

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "Client",
    "ClientError",
    "Conflict",
    "Forbidden",
    "InvalidJob",
    "Job",
    "JobDeleted",
    "JobEnded",
    "JobFailed",
    "JobMetadata",
    "NamespaceConflict",
    "NoCluster",
    "NoEffect",
    "NotFound",
    "NotInstalled",
    "PseudoRealJobSpec",
    "PseudoRealJobStatus",
    "Rejected",
    "RunFailed",
    "Unauthorized",
    "Unreachable",
    "Unreadable",
    "WaitTimeout",
    "read_metrics",
]
