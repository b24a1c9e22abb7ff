"""Checks of a job that the API server's schema cannot make, run when the job is first seen. Pure."""

import json
from typing import Any

from pseudoreal_api.base import GROUP
from pseudoreal_api.names import CONTAINER, is_reserved_variable
from pseudoreal_api.resolved.cache import cache_per_object
from pseudoreal_api.resolved.check import check_resolvable
from pseudoreal_api.spec.check import broken_rules
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJobSpec
from pseudoreal_api.spec.rules.rule import SEPARATOR

from pseudoreal_operator import clock
from pseudoreal_operator.changes import status_with
from pseudoreal_operator.lifecycle.decisions import Decision, pod_error_sentence, progressing, reject_job
from pseudoreal_operator.manifests.network import check_network
from pseudoreal_operator.observe.stages import Phases, pending_phases
from pseudoreal_operator.observe.view import View
from pseudoreal_operator.status.events import Event, Reason
from pseudoreal_operator.untrusted_text import sanitize

POD_BYTES = 65_536
"""Maximum size of a pod in bytes; a plain job's pod has 5,000."""
_MOST_EVALUATIONS = 300
"""Maximum number of evaluations of rules across fields for one job: enough for six phases. 300 evaluations take about
10 ms, and all other jobs wait meanwhile. For later phases, the policy of the API server and the trainer's check of its
configuration remain."""
_OPERATORS: dict[str, Any] = {
    "restartPolicy": "Never",
    "hostname": None,
    "subdomain": None,
    "setHostnameAsFQDN": None,
}
"""Pod fields that only the operator sets, each with the one harmless value that a user may give."""
_LAST_WORDS = ("terminationMessagePath", "terminationMessagePolicy")
"""Fields of the trainer container that decide where its termination message goes. Users may not set them: the message
tells the operator how a stage ended."""


def accept(view: View) -> Decision:
    """Return the decision on a job without phases in its status: a new one."""
    # The other checks assume that the rules hold.
    sentence = find_broken_rules(view.spec, view.metadata.name, 0) or find_problem(view.spec)
    if sentence := sentence or view.observed.job.queue_conflict:
        return reject_job(view.status, sentence, view.now)
    now = clock.to_text(view.now)
    status = status_with(
        view.status,
        start_time=now,
        active_since=now,
        phases=pending_phases(view.spec),
        # No phase has been trained yet, so there is nothing to repeat: these requests count as served.
        served_requests=[request.id for request in view.spec.requests if request.type == "RepeatPhase"],
    )
    return Decision(
        status,
        "Pending",
        progressing("Accepted", f"Phase {view.spec.phases[0].name} is about to start."),
        events=(Event(Reason.ACCEPTED, "The job is valid and starts with its first phase.", stage=0, execution=1),),
        with_dry_run=True,
    )


@cache_per_object
def find_broken_rules(spec: PseudoRealJobSpec, name: str, known: int) -> str | None:
    """Return the sentences of the rules across fields that the job breaks; None if it breaks none.

    The API server refuses such a job, unless the policy with the rules is missing or was installed later. Rules that
    the first `known` phases break by themselves are left out: a job that trains is older than the rules that it breaks.
    """
    metadata = JobMetadata(name=name)
    try:
        broken = broken_rules(metadata, spec, most=_MOST_EVALUATIONS)
        if broken and known:
            cut = spec.model_copy(update={"phases": spec.phases[:known]})
            # Without a maximum: a rule that is found broken must not count only because it is not evaluated again.
            before = broken_rules(metadata, cut, broken)
            broken = {rule: sentence for rule, sentence in broken.items() if before.get(rule) != sentence}
    except Exception as error:  # a rule cannot be evaluated
        return pod_error_sentence(error)
    return sanitize(SEPARATOR.join(broken.values())) or None


def find_problem_now(spec: PseudoRealJobSpec, name: str, phases: Phases) -> str | None:
    """Return a sentence on an error in the spec of a job that was accepted, such as in a phase that was added; None if
    the spec is valid. `phases`: those of the status."""
    started = sum(phase.state != "Pending" for phase in phases)
    return find_broken_rules(spec, name, started) or find_problem(spec)


@cache_per_object
def find_problem(spec: PseudoRealJobSpec, phases: int | None = None) -> str | None:
    """Return a sentence on an error in the spec, or in the spec with only its first `phases` phases; None if the spec
    is valid."""
    try:
        check(spec.model_copy(update={"phases": spec.phases[:phases]}))
    except ValueError as error:
        return sanitize(str(error))
    except Exception as error:  # a template may hold anything; raised here, it would fail every pass over the job
        return pod_error_sentence(error)
    return None


def check(spec: PseudoRealJobSpec) -> None:
    """Check the spec beyond its schema. Raises ValueError with a sentence for the user."""
    check_resolvable(spec)
    check_network(spec)
    check_template("spec.pod.template", spec.pod.template)
    for phase in spec.phases:
        check_template(f"spec.phases[{phase.name}].pod.template", phase.pod.template)
    _check_size(spec)


def _check_size(spec: PseudoRealJobSpec) -> None:
    """Raise ValueError if a pod is too large: every pod is a copy, and the operator reads all pods of a job at once."""
    start = spec.checkpoint.start_from
    weights = start.mounted if start else None
    volumes = [spec.data.volume, weights and weights.volume, *(phase.offload.volume for phase in spec.phases)]
    size = len(spec.pod.to_json()) + sum(len(json.dumps(volume)) for volume in volumes if volume)
    size += max(len(phase.pod.to_json()) for phase in spec.phases)
    if size > POD_BYTES:
        raise ValueError(
            f"spec.pod and the volumes have {size} bytes as JSON, more than the limit of {POD_BYTES}: each pod has a"
            " copy of them; move large values to a ConfigMap, and name it in spec.pod.template"
        )


def check_template(where: str, template: dict[str, Any]) -> None:
    """Check the user's overlay of pods. Raises ValueError for an overlay that breaks the operator's assumptions. A
    value that is not a PodTemplateSpec may raise any error; the API server rejects such values, because the CRD
    declares the type."""
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    for field in ("labels", "annotations"):
        for key in metadata.get(field) or {}:
            if key.startswith(f"{GROUP}/"):
                raise ValueError(f"{where}.metadata.{field}: {key} belongs to the operator; use another prefix")
    for field, harmless in _OPERATORS.items():
        if spec.get(field) not in (None, harmless):
            raise ValueError(f"{where}.spec.{field}: the operator sets it, and relies on it; remove it")
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or []:
            _check_container(f"{where}.spec.{kind}[{container['name']}]", container)


def _check_container(where: str, container: dict[str, Any]) -> None:
    for variable in container.get("env") or []:
        if is_reserved_variable(variable["name"]):
            name = variable["name"]
            raise ValueError(f"{where}.env: the name {name} is reserved: the operator sets it; remove it")
    for field in _LAST_WORDS if container["name"] == CONTAINER else ():
        if field in container:
            raise ValueError(f"{where}.{field}: the operator sets it, and relies on it; remove it")
