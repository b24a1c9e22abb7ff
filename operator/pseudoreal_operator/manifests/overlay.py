"""Lays the user's pod template over the operator's."""

from typing import Any

# In this order: a mount has a name too, but that of its volume, which may be mounted twice.
_KEYS = ("mountPath", "name")


def merge(base: Any, overlay: Any) -> Any:
    """Maps merge; lists of named entries merge by name (mounts by mountPath); everything else is replaced."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        return base | {key: merge(base[key], value) if key in base else value for key, value in overlay.items()}
    if isinstance(base, list) and isinstance(overlay, list):
        key = _common_key(base + overlay)
        return _merge_named(base, overlay, key) if key else overlay
    return overlay


def _common_key(entries: list[Any]) -> str | None:
    return next((key for key in _KEYS if all(isinstance(e, dict) and key in e for e in entries)), None)


def _merge_named(base: list[Any], overlay: list[Any], key: str) -> list[Any]:
    merged = {entry[key]: entry for entry in base}
    for entry in overlay:
        merged[entry[key]] = merge(merged.get(entry[key], {}), entry)
    return list(merged.values())
