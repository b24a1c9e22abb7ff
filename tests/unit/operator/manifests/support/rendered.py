"""Rendered children of a job, in the pieces that tests examine."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig, read_config
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.manifests.objects import children
from pseudoreal_operator.observe.stages import Stage, StageKind

from tests.unit.operator.support.world import SETTINGS, make_job

Json = dict[str, Any]

TRAIN = Stage(1, "real", StageKind.TRAIN)
DELINK = Stage(1, "real", StageKind.DELINK)
SITE = replace(
    SETTINGS, nccl_config="NCCL_IB_HCA=mlx5_0\n", report_url="https://operator.example:8443", report_ca="PEM\n"
)
"""Settings of a site that uses every site option."""


def made(stage: Stage = TRAIN, /, execution: Any = 3, **changes: Any) -> dict[str, Json]:
    return rendered(stage, execution, {}, **changes)


def rendered(stage: Stage, execution: int, options: dict[str, Any], /, **changes: Any) -> dict[str, Json]:
    """Return the children of a stage by kind. `options` may have `settings` and `avoid`."""
    avoided = list(options.get("avoid", ()))
    status = PseudoRealJobStatus(execution=execution, avoided_nodes=avoided)
    found = children(make_job(**changes), stage, status, options.get("settings", SETTINGS))
    return {child["kind"]: child for child in found}


def pod(stage: Stage = TRAIN, /, **changes: Any) -> Json:
    return pod_of(made(stage, **changes))


def container(stage: Stage = TRAIN, /, **changes: Any) -> Json:
    return container_of(made(stage, **changes))


def environment(stage: Stage = TRAIN, /, **changes: Any) -> dict[str, str]:
    return environment_of(made(stage, **changes))


def pod_of(found: dict[str, Json]) -> Json:
    spec: Json = found["Job"]["spec"]["template"]["spec"]
    return spec


def files_of(job: Json) -> dict[str, str]:
    """Return the files that the pods of a Job find in /etc/pseudoreal, as the kubelet shows them."""
    template = job["spec"]["template"]
    volume = next(v for v in template["spec"]["volumes"] if v["name"] == "config")
    found = {item["path"]: item["fieldRef"]["fieldPath"] for item in volume["downwardAPI"]["items"]}
    annotations = template["metadata"]["annotations"]
    return {name: annotations[path.removeprefix("metadata.annotations['")[:-2]] for name, path in found.items()}


def config_of(job: Json) -> PhaseConfig | DelinkConfig:
    """Return the configuration as a trainer of this release reads it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files_of(job).items():
            Path(folder, name).write_text(text)
        return read_config(Path(folder, "config.json"))


def container_of(found: dict[str, Json]) -> Json:
    return next(c for c in pod_of(found)["containers"] if c["name"] == "trainer")


def environment_of(found: dict[str, Json]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container_of(found)["env"] if "value" in e}
