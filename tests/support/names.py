"""Names as tests speak of them: those of children without the digest, which depends on the uid of the job."""

import re

OPERATOR = "pseudoreal-operator"
"""The user as whom operators ask the API server."""
_DIGEST = re.compile(r"-[a-z2-7]{6}(?=-e\d{1,4}\b)")
_LAST = re.compile(r"-[a-z2-7]{6}$")


def bare(text: str) -> str:
    """`llm-real-k3x7qa-e1` is `llm-real-e1`, also within a longer text."""
    return _DIGEST.sub("", text)


def bare_child(kind: str, name: str) -> str:
    """The name without its digest: of a Service, a NetworkPolicy or a Secret `llm-k3x7qa` it is `llm`."""
    return _LAST.sub("", name) if kind in ("Service", "NetworkPolicy", "Secret") else bare(name)
