"""Times as Kubernetes writes them: RFC 3339, UTC, whole seconds; microseconds for the time of an event."""

from datetime import UTC, datetime


def to_text(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_microseconds(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def from_text(text: str) -> datetime:
    return datetime.fromisoformat(text)
