"""Sizes of an engine test case."""

from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.sizes import Sizes, compute_bytes, master_bytes
from pseudoreal_trainer.plan.units import units_of

from tests.unit.trainer.engine.support.cases import Case


def sizes_of(case: Case) -> Sizes:
    return Sizes(
        model=case.model,
        units=units_of_rank(case.layout, units_of(case.model, case.sharing), 0),
        compute_bytes=compute_bytes(case.precision),
        master_bytes=master_bytes(case.precision),
        micro_batch=case.sequences,
        masks_documents=case.documents,
        moments=case.moments,
        gradients=case.gradients,
        products=case.products,
        uses_muon=case.algorithm == "Muon",
    )
