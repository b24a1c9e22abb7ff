"""All rules on a job, in the order of the CRD, and the rules on its name."""

from pseudoreal_api.names import HOST_NAME_CHARACTERS
from pseudoreal_api.spec.rules.data import DATA_RULES
from pseudoreal_api.spec.rules.experts import EXPERT_RULES, PROTOTYPE_RULES
from pseudoreal_api.spec.rules.model import MODEL_RULES
from pseudoreal_api.spec.rules.operation import OPERATION_RULES
from pseudoreal_api.spec.rules.optimizer import OPTIMIZER_RULES
from pseudoreal_api.spec.rules.phases import PHASE_RULES
from pseudoreal_api.spec.rules.pod import POD_RULES
from pseudoreal_api.spec.rules.rule import Rule, on_job, says
from pseudoreal_api.spec.rules.storage import STORAGE_RULES
from pseudoreal_api.spec.rules.vocabulary import VOCABULARY_RULES

# Jobs are named <job>-<phase>-<digest>-e<execution>; host names of their pods append -<index> and must be DNS labels of
# at most 63 characters. The names of delinks are longer and are cut.
NAME_BUDGET = HOST_NAME_CHARACTERS - len("--abcdef-e999-9999")

SPEC_RULES = (
    *MODEL_RULES,
    *EXPERT_RULES,
    *VOCABULARY_RULES,
    *PROTOTYPE_RULES,
    *DATA_RULES,
    *OPTIMIZER_RULES,
    *PHASE_RULES,
    *STORAGE_RULES,
    *OPERATION_RULES,
    *POD_RULES,
)

_TOO_LONG = f"size(self.metadata.name) + size(p.name) > {NAME_BUDGET}"
METADATA_RULES = (
    Rule(
        f"self.spec.phases.all(p, !({_TOO_LONG}))",
        f"self.spec.phases.filter(p, {_TOO_LONG}).map(p, "
        + says(
            "metadata.name %s and the phase name %s have %d characters together;"
            f" at most {NAME_BUDGET} fit into the host names of the pods",
            "self.metadata.name",
            "p.name",
            "size(self.metadata.name) + size(p.name)",
        )
        + ")[0]",
    ),
    on_job(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name %s must begin with a letter and have no dots: it becomes part of host names",
        "self.metadata.name",
    ),
)
