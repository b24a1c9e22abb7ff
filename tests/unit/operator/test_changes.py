"""The field types by which mypy checks changes of a status are those of the contract."""

from typing import get_type_hints

import pytest
from pseudoreal_api.base import ApiModel
from pseudoreal_api.status.status import PhaseStatus, PseudoRealJobStatus
from pseudoreal_operator.changes import PhaseFields, StatusFields


@pytest.mark.parametrize(
    ("model", "fields", "fixed"), [(PseudoRealJobStatus, StatusFields, set()), (PhaseStatus, PhaseFields, {"name"})]
)
def test_typed_dicts_have_the_fields_of_the_status_models(model: type[ApiModel], fields: type, fixed: set[str]) -> None:
    hints = get_type_hints(model)
    known = {name: hints[name] for name in model.model_fields if name not in fixed}
    assert get_type_hints(fields) == known
