"""Names of children are unique and fit into the fields that contain them."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pseudoreal_api.names import execution_name, network_name
from pseudoreal_api.spec.rules.job import NAME_BUDGET

from tests.support.names import bare

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMES = st.from_regex(r"[a-d]([-a-d]{0,20}[a-d])?", fullmatch=True)
_JOBS = st.tuples(_NAMES, st.uuids().map(str))
_EXECUTIONS = st.tuples(_JOBS, _NAMES, st.sampled_from(["train", "delink"]), st.integers(1, 9999)).filter(
    lambda found: len(found[0][0]) + len(found[1]) <= NAME_BUDGET
)

_LLM = ("llm", "0a1b2c3d-0000-4000-8000-000000000000")
_NEIGHBOUR = ("llm-real", "1a1b2c3d-0000-4000-8000-000000000000")


def _name(execution: Any) -> str:
    (job, uid), phase, stage, number = execution
    return execution_name(job, uid, phase, stage, number)


@example((_LLM, "real", "delink", 1), (_LLM, "real-delink", "train", 1))
@example((_LLM, "real", "delink", 1), (_NEIGHBOUR, "delink", "train", 1))
@given(_EXECUTIONS, _EXECUTIONS)
def test_no_two_executions_share_a_name(first: Any, second: Any) -> None:
    assert (_name(first) == _name(second)) == (first == second)


@given(_JOBS, _JOBS)
def test_no_two_jobs_share_a_service(first: Any, second: Any) -> None:
    assert (network_name(*first) == network_name(*second)) == (first == second)


@given(_EXECUTIONS)
def test_the_host_names_of_ten_thousand_pods_fit(execution: Any) -> None:
    name = _name(execution)
    assert len(f"{name}-9999") <= 63
    assert _LABEL.fullmatch(name)
    assert _LABEL.fullmatch(network_name(*execution[0]))
    assert len(network_name(*execution[0])) <= 63


def test_execution_names_begin_with_job_and_phase() -> None:
    names = [execution_name(*_LLM, "real", stage, 12) for stage in ("train", "delink")]
    assert [*map(bare, names)] == ["llm-real-e12", "llm-real-delink-e12"] != names
    long = execution_name("a" * 22, _LLM[1], "b" * 23, "delink", 999)
    assert bare(long) == f"{'a' * 22}-{'b' * 23}-e999", (
        "parts that do not fit are left out; the digest keeps the name unique"
    )


@pytest.mark.parametrize(
    "name", ["llm-pseudo-e4zov2-e1", "llm-pseudo-e2zzzz-e12", "llm-pseudo-k3x7qa-e1", "llm-pseudo-e44444-e9999"]
)
def test_names_without_their_digest_keep_the_phase(name: str) -> None:
    """A digest may start like an execution's number."""
    assert bare(f"{name}-0-9g7d9") == f"llm-pseudo-{name.rpartition('-')[2]}-0-9g7d9"
