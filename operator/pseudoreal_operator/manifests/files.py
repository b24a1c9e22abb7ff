"""The files of a pod in CONFIG_DIRECTORY: its configuration, and what the site adds. Pure.

They are annotations of the pod that a volume of the downward API shows as files, so they come and go with it: there is
no object beside the Job that could be missing, be left behind or be changed under a pod.
"""

from typing import Any

from pseudoreal_api.names import CONFIG_DIRECTORY, file_annotation

Json = dict[str, Any]

_VOLUME = "config"


def annotations(files: dict[str, str]) -> dict[str, str]:
    return {file_annotation(name): text for name, text in files.items()}


def volume(files: dict[str, str]) -> Json:
    items = [{"path": name, "fieldRef": {"fieldPath": _field(name)}} for name in files]
    return {"name": _VOLUME, "downwardAPI": {"items": items}}


def mount() -> Json:
    return {"name": _VOLUME, "mountPath": CONFIG_DIRECTORY, "readOnly": True}


def _field(file: str) -> str:
    return f"metadata.annotations['{file_annotation(file)}']"
