"""Names of children in tests, without their digest: the digest depends on the job's uid."""

import re

OPERATOR = "pseudoreal-operator"
"""User name of operators at the API server."""
_DIGEST = re.compile(r"-[a-z2-7]{6}(?=-e\d{1,4}\b)")
_LAST = re.compile(r"-[a-z2-7]{6}$")


def bare(text: str) -> str:
    """Remove the digests from a name or text: `llm-real-k3x7qa-e1` becomes `llm-real-e1`."""
    return _DIGEST.sub("", text)


def bare_child(kind: str, name: str) -> str:
    """Remove the digest from the name of a child: the Service, NetworkPolicy or Secret `llm-k3x7qa` becomes `llm`."""
    return _LAST.sub("", name) if kind in ("Service", "NetworkPolicy", "Secret") else bare(name)
