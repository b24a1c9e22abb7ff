"""Settings of the operator, from the environment variables of its Deployment."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

REPORT_PORT = 8443
USER = 10001
"""User id in the images of the operator and of the trainer."""
FILE_BYTES = 64 * 1024
"""Maximum size of a file that goes into each training pod: the file is an annotation there, and the API server
accepts at most 256 KiB of annotations together."""
POD_IDS = ("runAsUser", "runAsGroup", "fsGroup")
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


@dataclass(frozen=True)
class ReportServer:
    """Endpoint for reports: port, and paths of the files with its certificate, key and CAs."""

    port: int
    certificate: str
    key: str
    authority: str | None = None


@dataclass(frozen=True)
class Lease:
    namespace: str
    name: str
    holder: str


@dataclass(frozen=True)
class Settings:
    """Settings of the Deployment. `namespaces` is empty if the whole cluster is watched."""

    trainer_image: str
    pull_policy: PullPolicy
    namespaces: tuple[str, ...]
    health_port: int = 8080
    metrics_port: int | None = None
    """Port of the operator's own /metrics; None: it has none."""
    reports: ReportServer | None = None
    """Endpoint for reports; None: pods do not report."""
    lease: Lease | None = None
    """Lease to hold; None: no Lease is used, and two operators may run at once."""
    pod_ids: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(POD_IDS, USER))
    """Field of the training pods' security context (runAsUser, runAsGroup, fsGroup) -> id. Fields that the cluster
    chooses are left out."""
    nccl_config: str | None = None
    """Text of the site's nccl.conf; None: there is none."""
    report_url: str | None = None
    """URL that training pods report to; None: they do not report."""
    report_ca: str | None = None
    """CA certificates, in PEM, by which the training pods of new executions verify the endpoint for reports; None:
    there are none."""
    trainer_metrics_port: int | None = None
    """Port of /metrics in training pods; None: they have none."""
    scrapers: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers that may reach `trainer_metrics_port` of isolated pods; no others may."""


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings. Raises ValueError for a variable that is missing or wrong."""
    image = environment.get("PSEUDOREAL_TRAINER_IMAGE", "")
    if not image:
        raise ValueError("PSEUDOREAL_TRAINER_IMAGE is not set; set it to the trainer image of this release")
    policy = environment.get("PSEUDOREAL_TRAINER_PULL_POLICY") or "IfNotPresent"
    if policy not in get_args(PullPolicy):
        choices = ", ".join(get_args(PullPolicy))
        raise ValueError(f"PSEUDOREAL_TRAINER_PULL_POLICY is {policy}; set it to one of {choices}")
    return Settings(
        trainer_image=image,
        pull_policy=cast(PullPolicy, policy),
        namespaces=read_namespaces(environment),
        health_port=int(environment.get("PSEUDOREAL_HEALTH_PORT") or Settings.health_port),
        metrics_port=_port(environment, "PSEUDOREAL_METRICS_PORT"),
        pod_ids=_read_pod_ids(environment),
        nccl_config=_text_of(environment, "PSEUDOREAL_NCCL_CONFIG"),
        report_url=environment.get("PSEUDOREAL_REPORT_URL") or None,
        report_ca=_read_authorities(environment),
        reports=_read_reports(environment),
        lease=_read_lease(environment),
        trainer_metrics_port=_port(environment, "PSEUDOREAL_TRAINER_METRICS_PORT"),
        scrapers=_read_scrapers(environment),
    )


def _port(environment: Mapping[str, str], variable: str) -> int | None:
    text = environment.get(variable)
    return int(text) if text else None


def _read_pod_ids(environment: Mapping[str, str]) -> dict[str, int]:
    text = environment.get("PSEUDOREAL_POD_IDS") or json.dumps(dict.fromkeys(POD_IDS, USER))
    try:
        found = {name: number for name, number in json.loads(text).items() if number is not None}
    except (ValueError, AttributeError):
        found = {"": 0}
    if not found.keys() <= set(POD_IDS) or not all(type(number) is int for number in found.values()):
        raise ValueError(f"PSEUDOREAL_POD_IDS is {text}; set it to a JSON map of {', '.join(POD_IDS)} to numbers")
    return found


def _read_scrapers(environment: Mapping[str, str]) -> tuple[Mapping[str, Any], ...]:
    text = environment.get("PSEUDOREAL_SCRAPERS") or "[]"
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    # A peer without a selector would match all sources.
    if not isinstance(found, list) or not all(isinstance(peer, dict) and peer for peer in found):
        raise ValueError(f"PSEUDOREAL_SCRAPERS is {text}; set it to a JSON list of NetworkPolicyPeers")
    return tuple(found)


def _read_reports(environment: Mapping[str, str]) -> ReportServer | None:
    folder = environment.get("PSEUDOREAL_TLS_DIRECTORY", "")
    if not folder:
        return None
    port = int(environment.get("PSEUDOREAL_REPORT_PORT") or REPORT_PORT)
    authority = environment.get("PSEUDOREAL_REPORT_CA") or None
    return ReportServer(port, f"{folder}/tls.crt", f"{folder}/tls.key", authority)


def _read_authorities(environment: Mapping[str, str]) -> str | None:
    text = _text_of(environment, "PSEUDOREAL_REPORT_CA")
    if text is not None and "-----BEGIN CERTIFICATE-----" not in text:
        path = environment["PSEUDOREAL_REPORT_CA"]
        raise ValueError(f"PSEUDOREAL_REPORT_CA is {path}, which holds no certificate; let it hold the authority's")
    return text


def _read_lease(environment: Mapping[str, str]) -> Lease | None:
    namespace, _, name = environment.get("PSEUDOREAL_LEASE", "").partition("/")
    holder = environment.get("PSEUDOREAL_POD_NAME") or socket.gethostname()
    return Lease(namespace, name, holder) if name else None


def read_namespaces(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    names = environment.get("PSEUDOREAL_NAMESPACES", "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _text_of(environment: Mapping[str, str], variable: str) -> str | None:
    """Return the text of the file that the variable names; None if the variable is not set or the file is empty.
    Raises ValueError for a file that cannot be read, is no text, or is too large."""
    path = environment.get(variable)
    if not path:
        return None
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{variable} is {path}, which cannot be read ({error.strerror}); mount the file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{variable} is {path}, which is no text; mount another file") from None
    if (size := len(text.encode())) > FILE_BYTES:
        raise ValueError(
            f"{variable} is {path}, a file of {size} bytes; each training pod has it as an annotation, and"
            f" {FILE_BYTES} bytes are the most: leave out what the pods do not need"
        )
    return text or None
