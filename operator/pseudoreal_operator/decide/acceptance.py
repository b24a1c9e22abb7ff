"""What the API server's schema cannot see of a job, decided when the job is first seen. Pure."""

from typing import Any

from pseudoreal_api.base import GROUP
from pseudoreal_api.resolve import check_resolvable
from pseudoreal_api.run_spec import is_reserved
from pseudoreal_api.spec import PseudoRealJobSpec

from pseudoreal_operator.manifests.network import check_network

_PARTS = ("metadata", "spec")


def check(spec: PseudoRealJobSpec) -> None:
    """Raises ValueError with a sentence for the user."""
    check_resolvable(spec)
    check_network(spec)
    check_template(spec.pod.template)


def check_template(template: dict[str, Any]) -> None:
    """Raises ValueError for an overlay that would break what the operator relies on."""
    for part, value in template.items():
        if part not in _PARTS or not isinstance(value, dict):
            raise ValueError(
                f"spec.pod.template.{part}: only metadata and spec can stand there, each a map; move or remove it"
            )
    for key in template.get("metadata", {}).get("labels") or {}:
        if key.startswith(f"{GROUP}/"):
            raise ValueError(f"spec.pod.template.metadata.labels: {key} belongs to the operator; use another prefix")
    for where in ("initContainers", "containers"):
        for container in _named(template, where):
            _check_env(where, container)


def _named(template: dict[str, Any], where: str) -> list[dict[str, Any]]:
    containers = template.get("spec", {}).get(where) or []
    if not isinstance(containers, list) or not all(isinstance(c, dict) and "name" in c for c in containers):
        raise ValueError(f"spec.pod.template.spec.{where} must be a list of containers that each have a name")
    return containers


def _check_env(where: str, container: dict[str, Any]) -> None:
    for variable in container.get("env") or []:
        name = str(variable.get("name", "")) if isinstance(variable, dict) else ""
        if is_reserved(name):
            raise ValueError(
                f"spec.pod.template.spec.{where}[{container['name']}].env: the name {name} is reserved: the operator"
                " sets it; remove it"
            )
