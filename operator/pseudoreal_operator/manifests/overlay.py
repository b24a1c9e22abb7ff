"""Lays the user's pod template over the operator's."""

from typing import Any

# In this order: a mount has a name too, but that of its volume, which may be mounted twice.
_KEYS = ("mountPath", "name")
_ADDED_TO = ("labels", "annotations", "env")


def merge(base: Any, overlay: Any) -> Any:
    """`base` with `overlay` laid over it. Maps merge; lists of named entries merge by name (mounts by mountPath);
    everything else is replaced."""
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


def without_nulls(overlay: Any) -> Any:
    """The overlay without nulls that would take away all labels, annotations or variables, the operator's own among
    them. Elsewhere a null removes what the operator has set, such as a user id."""
    if isinstance(overlay, dict):
        kept = {key: value for key, value in overlay.items() if value is not None or key not in _ADDED_TO}
        return {key: without_nulls(value) for key, value in kept.items()}
    return [without_nulls(entry) for entry in overlay] if isinstance(overlay, list) else overlay
