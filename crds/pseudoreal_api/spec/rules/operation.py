"""Rules on the operation of a job: queue and gang, metrics sinks, restarts, hangs, requests."""

from pseudoreal_api.spec.rules.rule import on_job

_ONE_LIST = "[size(r.onExitCodes), size(r.onPodConditions), size(r.onReasons)].exists_one(n, n > 0)"
_DESCRIBED = "has(s.weightsAndBiases) == (s.type == 'WeightsAndBiases') && has(s.mlflow) == (s.type == 'MLflow')"

OPERATION_RULES = (
    *(
        on_job(
            f"has(self.scheduling.queue) || !{is_set}",
            f"spec.scheduling.{field} needs a queue; set scheduling.queue to the name of a LocalQueue, or remove"
            f" {field}",
        )
        for field, is_set in (
            ("queueDelink", "self.scheduling.queueDelink"),
            ("workloadPriorityClassName", "has(self.scheduling.workloadPriorityClassName)"),
        )
    ),
    on_job(
        "!has(self.scheduling.gang.timeoutSeconds) || self.scheduling.gang.policy == 'SchedulerPlugins'",
        "spec.scheduling.gang.timeoutSeconds is of policy SchedulerPlugins alone, and gang.policy is %s; remove it, and"
        " set deadlines.startupSeconds to let go of pods that do not all get nodes",
        "self.scheduling.gang.policy",
    ),
    on_job(
        "!has(self.scheduling.topology) ||"
        " has(self.scheduling.topology.required) != has(self.scheduling.topology.preferred)",
        "spec.scheduling.topology needs either required or preferred, with the key of a label of nodes; set one of"
        " them",
    ),
    on_job(
        f"self.logging.sinks.all(s, {_DESCRIBED})",
        "spec.logging.sinks: the one of type %s needs the field of that type, and no other; set weightsAndBiases for"
        " WeightsAndBiases, mlflow for MLflow",
        f"self.logging.sinks.filter(s, !({_DESCRIBED}))[0].type",
    ),
    on_job(
        f"self.restart.rules.all(r, {_ONE_LIST})",
        "spec.restart.rules: the rule with the action %s needs exactly one of onExitCodes, onPodConditions, onReasons",
        f"self.restart.rules.filter(r, !({_ONE_LIST}))[0].action",
    ),
    on_job(
        "!has(self.restart.windowSeconds) || self.restart.maxRestarts <= 100",
        "spec.restart.maxRestarts %d must be at most 100 beside spec.restart.windowSeconds, as each one is remembered",
        "self.restart.maxRestarts",
    ),
    on_job(
        "double(self.hang.stragglerFactor) > 1.0",
        "spec.hang.stragglerFactor %s must be greater than 1",
        "self.hang.stragglerFactor",
    ),
    on_job(
        "self.requests.all(r, self.phases.exists(p, p.name == r.phase))",
        "spec.requests[%s].phase %s is none of spec.phases; name one of them",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].id",
        "self.requests.filter(r, !self.phases.exists(p, p.name == r.phase))[0].phase",
    ),
)
