"""Certificate authority of a cluster, certificates of this authority, and kubeconfigs with these certificates."""

import base64
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = timedelta(days=3650)
CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True)
class KeyPair:
    """Paths of a PEM certificate and its PEM private key."""

    certificate: Path
    key: Path


class Authority:
    """Certificate authority with its files in one folder; missing files are created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.crt"
        self.key = folder / "ca.key"
        self._name = _name("pseudoreal-ca", [])
        self._key = self._read() if self.certificate.exists() else self._make()

    def _read(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self.key.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), (
            "the key was written by `_make`, which creates an elliptic curve key"
        )
        return key

    def _make(self) -> ec.EllipticCurvePrivateKey:
        self.folder.mkdir(parents=True, exist_ok=True)
        key = write_key(self.key, ec.generate_private_key(ec.SECP256R1()))
        certificate = (
            _builder(self._name, self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return key

    def issue(self, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> KeyPair:
        """Issue a client certificate for `user` in `groups`. The certificate is also valid for a server at `hosts`
        (names and IP addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(_name(user, groups), self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        pair = KeyPair(self.folder / f"{_file(user)}.crt", self.folder / f"{_file(user)}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_key(pair.key, key)
        return pair

    def kubeconfig(self, path: Path, server: str, context: str, user: KeyPair) -> Path:
        """Write a self-contained kubeconfig with one context, readable by its owner alone."""
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(_kubeconfig(server, context, self.certificate, user), sort_keys=False))
        return path


def write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> ec.EllipticCurvePrivateKey:
    """Write a private key, readable by its owner alone."""
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return key


def write_signing_key(path: Path) -> None:
    """Write a new signing key for service account tokens."""
    write_key(path, ec.generate_private_key(ec.SECP256R1()))


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _builder(subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _file(user: str) -> str:
    return user.replace(":", "-")


def _kubeconfig(server: str, context: str, authority: Path, user: KeyPair) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": context, "cluster": {"server": server, "certificate-authority-data": _encoded(authority)}}
        ],
        "users": [
            {
                "name": context,
                "user": {
                    "client-certificate-data": _encoded(user.certificate),
                    "client-key-data": _encoded(user.key),
                },
            }
        ],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "current-context": context,
    }


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
