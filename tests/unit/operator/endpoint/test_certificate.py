"""Renewal of the certificate, by its CA or self-signed: running pods and new pods continue to report."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from pseudoreal_api.wire.authorities import authorities_digest
from pseudoreal_api.wire.reports import REPORT_PATH, PodReport, RankReport
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_operator.endpoint.certificate import HOLD_SECONDS, Certificate, keep_fresh
from pseudoreal_operator.endpoint.server import Reports, run_endpoint
from pseudoreal_operator.observe.report_store import ReportStore
from pseudoreal_operator.settings import ReportServer
from pseudoreal_trainer.runtime.reports import Endpoint
from structlog.testing import capture_logs

from tests.unit.operator.endpoint.support.clock import HandClock
from tests.unit.operator.endpoint.support.known import JOB, KnownPods
from tests.unit.operator.observe.support.reports import PODS

HOST = "127.0.0.1"
LIFETIME = timedelta(days=90)
REPORT = PodReport(ranks=[RankReport(rank=0, activity="computing", seconds=0.5, step=3)])


class Secret:
    """The folder of a mounted Secret."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.files = ReportServer(0, *(str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt")))

    @property
    def authority(self) -> str:
        return (self.folder / "ca.crt").read_text()

    def renew_by_itself(self) -> None:
        """Renew the certificate as cert-manager's SelfSigned issuer does: with a new key, and the certificate as its
        own CA."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        found = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(x509.Name([]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + LIFETIME)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=True)
            .sign(key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = found.public_bytes(serialization.Encoding.PEM)
        for name, content in (("tls.crt", public), ("tls.key", private), ("ca.crt", public)):
            (self.folder / name).write_bytes(content)

    def renew_by(self, authority: Authority) -> None:
        authority.issue("tls", hosts=[HOST])
        for name in ("tls.crt", "tls.key", "ca.crt"):
            shutil.copy(authority.folder / name, self.folder / name)


class Pods:
    """Pods with the trainer's own client, which perform a TLS handshake for each report."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port

    def make_pod(self, name: str, authorities: str) -> Endpoint:
        """Return a pod that was created with these CAs."""
        token, authority = self._folder / f"{name}.token", self._folder / f"{name}.crt"
        token.write_text(f"pod-{name}")
        authority.write_text(authorities)
        return Endpoint(f"https://{HOST}:{self._port}{REPORT_PATH}", token, authority)

    async def can_report(self, pod: Endpoint) -> bool:
        if pod._idle is not None:
            pod._idle.close()
        try:
            await asyncio.to_thread(pod.send, REPORT)
        except ssl.SSLCertVerificationError:
            return False
        return True


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    secret = Secret(tmp_path / "tls")
    secret.renew_by_itself()
    return secret


@pytest.fixture
def clock() -> HandClock:
    return HandClock(datetime.now(UTC).timestamp())


@pytest.fixture
def taught() -> list[str]:
    """CAs that new executions were taught to trust."""
    return []


@pytest.fixture
def certificate(secret: Secret, clock: HandClock, taught: list[str]) -> Certificate:
    return Certificate(secret.files, HOST, taught.append, clock)


async def serve(certificate: Certificate, folder: Path) -> AsyncIterator[Pods]:
    report_store = ReportStore()
    report_store.follow(JOB, PODS)
    reports = Reports(KnownPods(), report_store, authorities=certificate.authorities_beyond)
    async with run_endpoint(reports, certificate.context, 0) as port:
        yield Pods(folder, port)


@pytest.fixture
async def pods(certificate: Certificate, tmp_path: Path) -> AsyncIterator[Pods]:
    async for found in serve(certificate, tmp_path):
        yield found


async def test_renewed_self_signed_certificate_is_served_after_pods_learn_its_authority(
    secret: Secret, certificate: Certificate, pods: Pods, clock: HandClock, taught: list[str]
) -> None:
    first = secret.authority
    old, mute = pods.make_pod("0", first), pods.make_pod("1", first)
    assert await pods.can_report(old)
    secret.renew_by_itself()
    certificate.reload()
    assert taught == [secret.authority + first]
    new, stranger = pods.make_pod("2", taught[0]), pods.make_pod("3", secret.authority)
    assert [await pods.can_report(pod) for pod in (old, new, stranger)] == [True, True, False], "the old one is served"
    clock.now += HOLD_SECONDS - 1
    certificate.reload()
    assert [await pods.can_report(pod) for pod in (old, new, stranger)] == [True, True, False]
    clock.now += 1
    certificate.reload()
    heard = [await pods.can_report(pod) for pod in (old, new, stranger, mute)]
    assert heard == [True, True, True, False], "whoever reported meanwhile has learned of the new one"


async def test_certificate_that_expires_soon_is_held_for_less_than_a_day(
    secret: Secret, clock: HandClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LIFETIME", timedelta(minutes=59))
    secret.renew_by_itself()
    certificate = Certificate(secret.files, HOST, clock=clock)
    secret.renew_by_itself()
    certificate.reload()
    for seconds, is_served in ((57 * 60 - 10, False), (20, True)):
        clock.now += seconds
        certificate.reload()
        async for pods in serve(certificate, tmp_path):
            assert await pods.can_report(pods.make_pod("0", secret.authority)) == is_served


async def test_pods_that_know_the_new_authority_report_to_an_operator_started_later(
    secret: Secret, certificate: Certificate, pods: Pods, tmp_path: Path
) -> None:
    old = pods.make_pod("0", secret.authority)
    secret.renew_by_itself()
    certificate.reload()
    assert await pods.can_report(old)
    async for later in serve(Certificate(secret.files, HOST), tmp_path):
        moved = later.make_pod("0", old.authority.read_text())
        assert not await later.can_report(moved), "it has not learned of it"
        moved._learned = old._learned
        assert await later.can_report(moved)
        assert authorities_digest(moved._learned or "") == authorities_digest(secret.authority)


async def test_certificate_of_a_known_authority_is_served_at_once(tmp_path: Path, clock: HandClock) -> None:
    secret, authority, taught = Secret(tmp_path / "tls"), Authority(tmp_path / "authority"), list[str]()
    secret.renew_by(authority)
    certificate = Certificate(secret.files, HOST, taught.append, clock)
    before = (secret.folder / "tls.crt").read_text()
    secret.renew_by(authority)
    assert before != (secret.folder / "tls.crt").read_text()
    with capture_logs() as logs:
        certificate.reload()
        certificate.reload()
    assert [entry["event"] for entry in logs] == ["certificate_served"]
    assert taught == [secret.authority]


async def test_pods_trust_the_served_and_the_next_certificate_after_two_renewals(
    secret: Secret, certificate: Certificate, pods: Pods, clock: HandClock
) -> None:
    first = secret.authority
    old = pods.make_pod("0", first)
    for _ in range(2):
        secret.renew_by_itself()
        certificate.reload()
        assert await pods.can_report(old)
    assert certificate.authorities == secret.authority + first
    clock.now += HOLD_SECONDS
    certificate.reload()
    assert await pods.can_report(old)


async def test_certificate_files_replaced_one_by_one_are_loaded_together(tmp_path: Path) -> None:
    secret, next_one = Secret(tmp_path / "tls"), Secret(tmp_path / "next")
    authority = Authority(tmp_path / "authority")
    secret.renew_by(authority)
    next_one.renew_by(authority)
    certificate = Certificate(secret.files, HOST)
    shutil.copy(next_one.files.certificate, secret.files.certificate)
    with pytest.raises(ssl.SSLError):
        certificate.reload()
    async for pods in serve(certificate, tmp_path):
        assert await pods.can_report(pods.make_pod("0", secret.authority)), "the old one is served"
    shutil.copy(next_one.files.key, secret.files.key)
    with capture_logs() as logs:
        certificate.reload()
    assert [entry["event"] for entry in logs] == ["certificate_served"]


async def test_certificate_files_are_reloaded_periodically(secret: Secret, certificate: Certificate) -> None:
    before = certificate.authorities
    async with keep_fresh(certificate, every=0.01), asyncio.timeout(60):
        Path(secret.files.key).write_text("none")
        await asyncio.sleep(0.03)
        assert certificate.authorities == before
        secret.renew_by_itself()
        while certificate.authorities == before:
            await asyncio.sleep(0.01)


def test_too_many_authorities_are_rejected(secret: Secret, certificate: Certificate) -> None:
    before = certificate.authorities
    secret.renew_by_itself()
    blocks = (f"-----BEGIN CERTIFICATE-----\n{n:0>1000}\n-----END CERTIFICATE-----\n" for n in range(64))
    (secret.folder / "ca.crt").write_text("".join(blocks))
    with pytest.raises(ValueError, match="more than 65536 bytes of certificates"):
        certificate.reload()
    assert certificate.authorities == before


def test_certificate_not_signed_by_its_authority_is_logged(secret: Secret, tmp_path: Path) -> None:
    other = Secret(tmp_path / "other")
    other.renew_by_itself()
    shutil.copy(other.folder / "ca.crt", secret.folder / "ca.crt")
    with capture_logs() as logs:
        certificate = Certificate(secret.files, HOST)
        other.renew_by_itself()
        for name in ("tls.crt", "tls.key", "ca.crt"):
            shutil.copy(other.folder / name, secret.folder / name)
        certificate.reload()
    assert [entry["event"] for entry in logs] == ["certificate_untrusted", "certificate_served"], "it helps nobody"


def test_pod_that_sends_no_digest_receives_no_authorities(certificate: Certificate) -> None:
    assert certificate.authorities_beyond("") is None
    assert certificate.authorities_beyond(authorities_digest(certificate.authorities)) is None
    assert certificate.authorities_beyond("another") == certificate.authorities
