"""Certificates of the authorities by which a pod knows the operator, as text in PEM. Pure.

OpenSSL takes of several trusted certificates with one subject a single one as the issuer, so a certificate that signed
itself and its successor, which has the same subject, cannot be trusted in one context: a client tries one set of
authorities after the other.
"""

import re
from hashlib import sha256

AUTHORITIES_BYTES = 64 * 1024
"""Size limit of all of them."""
_MOST_ALONE = 8
"""Most certificates that are tried alone, of the first."""
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\\s]+-----END CERTIFICATE-----")


def certificates_in(text: str) -> list[str]:
    """The certificates in a text, each once and with a line feed at its end, without what is written beside them."""
    return [f"{found}\n" for found in dict.fromkeys(_CERTIFICATE.findall(text))]


def trust_sets(text: str) -> list[str]:
    """The sets of authorities that a client tries: all together, as chains may need it, and then each alone."""
    found = certificates_in(text)
    return list(dict.fromkeys(["".join(found), *found[:_MOST_ALONE]])) if found else []


def authorities_digest(text: str) -> str:
    """The digest of the certificates in a text."""
    return sha256("".join(certificates_in(text)).encode()).hexdigest()
