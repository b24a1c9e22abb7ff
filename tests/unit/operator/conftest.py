"""What the operator's program does before its first pass."""

import pytest
from pseudoreal_api.spec.check import compile_rules


@pytest.fixture(scope="session", autouse=True)
def compiled_rules() -> None:
    """Compile the rules. The first plan would do so within its limit of processor time, and could exceed it on a slow
    machine."""
    compile_rules()
