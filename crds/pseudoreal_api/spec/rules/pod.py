"""Rules on pods: network and environment."""

from pseudoreal_api.environment import RESERVED_ENV, RESERVED_ENV_PREFIXES
from pseudoreal_api.spec.rules.rule import on_each_phase, on_job

_RESERVED = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_IS_RESERVED = " || ".join(
    [f"e.name in [{_RESERVED}]"] + [f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
)
_ONE_VALUE = "has(e.value) != has(e.valueFrom)"

POD_RULES = (
    on_job(
        "self.network.mode != 'RDMA' || has(self.network.rdmaResource) || self.network.hostNetwork",
        "spec.network.mode %s needs adapters in the pods; set network.rdmaResource to the resource of an"
        " RDMA device plugin, or network.hostNetwork",
        "self.network.mode",
    ),
    on_job(
        f"self.pod.env.all(e, !({_IS_RESERVED}))",
        "spec.pod.env: the name %s is reserved for the operator; remove it",
        f"self.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    on_job(
        f"self.pod.env.all(e, {_ONE_VALUE})",
        "spec.pod.env[%s] needs either value or valueFrom; set one of them",
        f"self.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
    on_each_phase(
        f"p.pod.env.all(e, !({_IS_RESERVED}))",
        ".pod.env: the name %s is reserved for the operator; remove it",
        f"p.pod.env.filter(e, {_IS_RESERVED})[0].name",
    ),
    on_each_phase(
        f"p.pod.env.all(e, {_ONE_VALUE})",
        ".pod.env[%s] needs either value or valueFrom; set one of them",
        f"p.pod.env.filter(e, !({_ONE_VALUE}))[0].name",
    ),
)
