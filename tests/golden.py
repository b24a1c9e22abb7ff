"""Realistic jobs and all that the operator makes of them, as files: tests/data/golden/jobs and .../children.

`python -m tests.golden` renders the children anew. Read the difference before you commit it.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.manifests.objects import children, claim_manifest
from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_operator.settings import Settings

Json = dict[str, Any]

_FOLDER = Path(__file__).parent / "data" / "golden"
UID = "5f6a7b8c-1234-4abc-8def-0123456789ab"

PLAIN = Settings("registry.example/trainer:1.0", "IfNotPresent", ())
SITE = replace(
    PLAIN,
    nccl_config="NCCL_IB_HCA=mlx5_0,mlx5_1\nNCCL_IB_GID_INDEX=3\n",
    report_url="https://pseudoreal.pseudoreal.svc:8443/v1/report",
    report_ca="-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
)


@dataclass(frozen=True)
class _Place:
    """Where a job is run, beside what it says itself."""

    settings: Settings = PLAIN
    avoid: tuple[str, ...] = ()


_PLACES = {"huge-pages": _Place(SITE), "queue": _Place(avoid=("node-17", "node-4"))}


def names() -> list[str]:
    return sorted(path.stem for path in (_FOLDER / "jobs").glob("*.yaml"))


def job(name: str) -> Json:
    """The job as a user writes it."""
    body: Json = yaml.safe_load((_FOLDER / "jobs" / f"{name}.yaml").read_text())
    return body


@cache
def manifests(name: str) -> list[Json]:
    """What the operator makes now: the claim, and the children of all stages in their order."""
    body = job(name)
    body["metadata"] |= {"uid": UID, "generation": 1}
    read, place = PseudoRealJob.from_object(body), _PLACES.get(name, _Place())
    status = PseudoRealJobStatus(execution=1, avoided_nodes=list(place.avoid))
    made = [claim_manifest(read)]
    for stage in _stages(read):
        made += children(read, stage, status, place.settings)
    return [manifest for manifest in made if manifest]


def _stages(read: PseudoRealJob) -> list[Stage]:
    phases = list(enumerate(read.spec.phases))
    both = [Stage(index, phase.name, kind) for index, phase in phases for kind in (StageKind.DELINK, StageKind.TRAIN)]
    return both[1:]


def rendered(name: str) -> str:
    return yaml.dump_all(manifests(name), Dumper=_Dumper, sort_keys=False, width=120)


def stored(name: str) -> str:
    """What it made when the files were last rendered."""
    return _children(name).read_text()


def _children(name: str) -> Path:
    return _FOLDER / "children" / f"{name}.yaml"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as they are, and nothing refers to what stands elsewhere."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def main() -> None:
    for name in names():
        _children(name).write_text(rendered(name))


if __name__ == "__main__":
    main()
