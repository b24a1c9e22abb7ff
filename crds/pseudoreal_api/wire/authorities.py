"""CA certificates for the verification of the operator by a pod, as PEM text. Pure.

Among several trusted certificates with one subject, OpenSSL considers only one as the issuer. A self-signed certificate
and its successor have the same subject, so one context cannot trust both. A client therefore tries one trust set after
the other.
"""

import re
from hashlib import sha256

AUTHORITIES_BYTES = 64 * 1024
"""Size limit of all CA certificates together."""
_MOST_ALONE = 8
"""Maximum number of certificates tried alone, counted from the first."""
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\\s]+-----END CERTIFICATE-----")


def certificates_in(text: str) -> list[str]:
    """Return the certificates in a text, each once and with a final line feed, without any other text."""
    return [f"{found}\n" for found in dict.fromkeys(_CERTIFICATE.findall(text))]


def trust_sets(text: str) -> list[str]:
    """Return the trust sets for a client to try: first all certificates together, in case a chain needs them, then each
    alone."""
    found = certificates_in(text)
    return list(dict.fromkeys(["".join(found), *found[:_MOST_ALONE]])) if found else []


def authorities_digest(text: str) -> str:
    """Return the digest of the certificates in a text."""
    return sha256("".join(certificates_in(text)).encode()).hexdigest()
