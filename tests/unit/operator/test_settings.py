"""Settings from the operator's Deployment."""

import json
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_operator.settings import FILE_BYTES, Lease, ReportServer, read_settings


def test_settings_are_read_from_the_environment() -> None:
    settings = read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t:1", "PSEUDOREAL_NAMESPACES": "a, b,"})
    assert (settings.trainer_image, settings.pull_policy, settings.namespaces) == ("t:1", "IfNotPresent", ("a", "b"))
    assert read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t:1"}).namespaces == ()


def test_report_endpoint_and_lease_are_optional() -> None:
    alone = {"PSEUDOREAL_TRAINER_IMAGE": "t:1"}
    settings = read_settings(alone)
    assert (settings.reports, settings.lease) == (None, None)
    with_both = {"PSEUDOREAL_TLS_DIRECTORY": "/tls", "PSEUDOREAL_LEASE": "ops/pseudoreal", "PSEUDOREAL_POD_NAME": "pod"}
    settings = read_settings(alone | with_both)
    assert settings.reports == ReportServer(8443, "/tls/tls.crt", "/tls/tls.key")
    assert settings.lease == Lease("ops", "pseudoreal", "pod")
    settings = read_settings(alone | with_both | {"PSEUDOREAL_REPORT_PORT": "9443"})
    assert settings.reports
    assert settings.reports.port == 9443


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}),
        ('{"runAsUser": null, "runAsGroup": 0, "fsGroup": null}', {"runAsGroup": 0}),
    ],
)
def test_user_and_groups_of_training_pods_are_configurable(text: str, ids: dict[str, int]) -> None:
    assert read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t:1", "PSEUDOREAL_POD_IDS": text}).pod_ids == ids


def test_settings_can_be_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_IB_HCA=mlx5_0\n")
    (tmp_path / "ca.crt").write_text("")
    settings = read_settings(
        {
            "PSEUDOREAL_TRAINER_IMAGE": "t:1",
            "PSEUDOREAL_NCCL_CONFIG": str(tmp_path / "nccl.conf"),
            "PSEUDOREAL_REPORT_URL": "https://operator.example",
            "PSEUDOREAL_REPORT_CA": str(tmp_path / "ca.crt"),
        }
    )
    assert settings.nccl_config == "NCCL_IB_HCA=mlx5_0\n"
    assert (settings.report_url, settings.report_ca) == ("https://operator.example", None)


def test_metrics_ports_are_optional() -> None:
    alone = {"PSEUDOREAL_TRAINER_IMAGE": "t:1"}
    settings = read_settings(alone)
    assert (settings.metrics_port, settings.trainer_metrics_port, settings.scrapers) == (None, None, ())
    peer: dict[str, Any] = {"namespaceSelector": {}}
    ports = {"PSEUDOREAL_METRICS_PORT": "8081", "PSEUDOREAL_TRAINER_METRICS_PORT": "9464"}
    settings = read_settings(alone | ports | {"PSEUDOREAL_SCRAPERS": json.dumps([peer])})
    assert (settings.metrics_port, settings.trainer_metrics_port, settings.scrapers) == (8081, 9464, (peer,))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "PSEUDOREAL_TRAINER_IMAGE is not set"),
        *[
            ({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_POD_IDS": text}, "PSEUDOREAL_POD_IDS is .* a JSON map of")
            for text in ("10001", "{", '{"user": 1}', '{"runAsUser": "1"}')
        ],
        *[
            ({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_SCRAPERS": text}, "PSEUDOREAL_SCRAPERS is .* a JSON list of")
            for text in ("monitoring", "{}", '["monitoring"]', "[{}]")
        ],
        ({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_TRAINER_PULL_POLICY": "Maybe"}, "one of Always, IfNotPresent"),
        (
            {"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_NCCL_CONFIG": "/none"},
            "NCCL_CONFIG is /none, which",
        ),
    ],
)
def test_invalid_settings_are_rejected_with_a_sentence(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_settings(environment)


@pytest.mark.parametrize("variable", ["PSEUDOREAL_NCCL_CONFIG", "PSEUDOREAL_REPORT_CA"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"#" * (FILE_BYTES + 1), "a file of 65537 bytes; .* annotation, and 65536 bytes are the most: leave out"),
        (b"\xff\xfe", "no text; mount another file"),
    ],
)
def test_settings_files_that_are_too_large_or_unreadable_are_rejected(
    tmp_path: Path, variable: str, content: bytes, says: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{variable} is {file}, .*{says}"):
        read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t", variable: str(file)})


def test_file_without_a_certificate_is_rejected_as_authority(tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text("none")
    with pytest.raises(ValueError, match="holds no certificate"):
        read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_REPORT_CA": str(file)})


def test_settings_file_of_exactly_the_limit_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("#" * FILE_BYTES)
    settings = read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_NCCL_CONFIG": str(file)})
    assert settings.nccl_config == "#" * FILE_BYTES
