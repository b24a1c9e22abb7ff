"""Classification of a failed execution by ordered rules: the job's own rules, then the built-in rules. Also the limit
on restarts in place, which pods make without asking the operator. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pseudoreal_api.spec.recovery import Restart, RestartRule, RuleAction
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.messages import ExitCode

from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase, Termination
from pseudoreal_operator.untrusted_text import shorten

_QUOTED = 600
"""Maximum number of characters that a sentence quotes from a pod."""
_OUT_OF_MEMORY = "OOMKilled"
_NODE_DISRUPTIONS = ("TerminationByKubelet", "DeletionByTaintManager", "NodeLost")
"""Kubernetes' reasons for disruptions by the node itself: eviction by the kubelet, for instance because of a full
disk, or a lost node."""

POD_REJECTED = "PodRejected"
"""Reason of a failure: the scheduler sent the pod to a node, and the node rejected it."""
NODE_FAILED = "NodeFailed"
"""Reason of a failure: the node lost the pod's containers, as by a reboot."""
_FAULTS_OF_THE_SPEC = (
    "DeadlineExceeded",
    "SysctlForbidden",
    "AppArmor",
    "PodOSNotSupported",
    "PodOSSelectorNodeLabelDoesNotMatch",
)
"""Kubernetes' reasons for pods that ended before they ran because of their own spec: any node would reject them."""
_SHUT_DOWN = ("Terminated", "NodeShutdown", "Shutdown")
"""Kubernetes' reasons for pods that a node ended as it shut down."""
_UNKNOWN_EXIT_CODE = 255
"""Exit code that a container runtime reports, with the reason Unknown, for a container that ended with its node."""

# The first rule that any pod meets decides. A disruption of one pod makes its peers fail, so it explains their failures
# too. The rules for out of memory come before disruptions: a container at its limit would fail again in any place.
_BUILT_IN = (
    RestartRule(on_exit_codes=[ExitCode.INVALID_JOB], action="Fail"),
    RestartRule(on_reasons=[_OUT_OF_MEMORY], action="Restart"),
    RestartRule(on_exit_codes=[ExitCode.OUT_OF_MEMORY], action="Restart"),
    RestartRule(on_pod_conditions=["DisruptionTarget"], action="RestartIgnoringLimit"),
    RestartRule(on_reasons=["NodeLost"], action="RestartIgnoringLimit"),
)


@dataclass(frozen=True)
class Verdict:
    """Classification of a failed execution. `reason`: one word for programs. `pod`: the pod in which the failure began;
    None: unknown."""

    action: RuleAction
    reason: str
    sentence: str
    pod: Pod | None = None


@dataclass(frozen=True)
class MissingPods:
    """Pods without a termination message. `stuck`: a pod that cannot be ended, as on a node that is off; `workers`:
    numbers of missing workers whose pods the operator has not ended."""

    stuck: Pod | None = None
    workers: Sequence[int] = ()


def classify(
    job_name: str, pods: Sequence[Pod], rules: Sequence[RestartRule] = (), missing: MissingPods | None = None
) -> Verdict:
    """Return the verdict on an execution. `pods`: its pods that still exist; a pod that ended by deletion is not
    among them."""
    ended = sorted((pod for pod in pods if pod.phase is PodPhase.FAILED or pod.disruption), key=_origin_first)
    for rule in (*rules, *_BUILT_IN):
        culprit = next((pod for pod in ended if matches_rule(pod, rule)), None)
        if culprit:
            return _verdict(rule, culprit, own=rule in rules)
    if by_node := next((pod for pod in ended if node_fault(pod)), None):
        return Verdict("RestartIgnoringLimit", node_fault(by_node) or "", _node_sentence(by_node), by_node)
    failed = [pod for pod in ended if pod.phase is PodPhase.FAILED]
    faulty = next((pod for pod in failed if not has_exit_code(pod, ExitCode.YIELDED)), None)
    if faulty and has_lost_peer(faulty):
        return _verdict_on_lost_peer(missing or MissingPods(), job_name, faulty)
    if faulty:
        return Verdict("Restart", "PodFailed", _fault_sentence(faulty), faulty)
    if failed:
        return Verdict("RestartIgnoringLimit", "Yielded", f"{_pod_title(failed[0])} was asked to stop.", failed[0])
    return Verdict("RestartIgnoringLimit", "PodsDeleted", f"The pods of {job_name} were deleted.")


def _verdict_on_lost_peer(missing: MissingPods, job_name: str, witness: Pod) -> Verdict:
    """Return the verdict when every pod that ended blames a lost peer and none reports a cause of its own."""
    said = f"{_pod_title(witness)} lost its connection to"
    if missing.stuck:
        text = f"{_pod_title(missing.stuck)} does not answer, as if its node were off; {said} it."
        return Verdict("RestartIgnoringLimit", "NodeLost", text, missing.stuck)
    if missing.workers:
        lost = "it" if len(missing.workers) == 1 else "them"
        text = f"{disappeared_sentence(job_name, missing.workers).rstrip('.')}; {said} {lost}."
        return Verdict("RestartIgnoringLimit", "PodsDeleted", text)
    return Verdict("Restart", "PeerLost", f"{_fault_sentence(witness)} No pod says why.")


def disappeared_sentence(job_name: str, workers: Sequence[int]) -> str:
    """Return a sentence for users, which says that the pods of these workers are gone. `workers`: numbers of one or
    more workers."""
    if len(workers) == 1:
        return f"The pod of worker {workers[0]} of {job_name} disappeared without a message, as a deleted pod does."
    return f"The pods of {worker_title(workers)} of {job_name} disappeared without a message, as deleted pods do."


def worker_title(workers: Sequence[int]) -> str:
    """Return the numbers of one or more workers as text, such as `worker 1`, or `workers 1, 3 and 4`."""
    *others, last = map(str, workers)
    return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


def can_another_pod_succeed(verdict: Verdict) -> bool:
    """Return whether a replacement pod may succeed as the same worker. After an out-of-memory failure a replacement
    would fail too, because it has the same memory."""
    return verdict.action != "Fail" and verdict.reason != "OutOfMemory"


def has_lost_peer(pod: Pod) -> bool:
    """Return whether the pod ended because its connection to another pod broke. The cause is then in the other pod,
    even if the other pod ended later."""
    message = pod.termination.message if pod.termination else None
    return message is not None and message.peer_lost


def is_node_at_fault(pod: Pod) -> bool:
    """Return whether the pod was disrupted by a fault of its node, which may recur. Preemption by the scheduler and the
    drain of a node are not faults of the node."""
    return node_fault(pod) is not None or (pod.disruption is not None and pod.disruption.startswith(_NODE_DISRUPTIONS))


def is_rejected_by_node(pod: Pod) -> bool:
    """Return whether the pod's node rejected it. The scheduler does not know the reason, and may send the next pod to
    the same node."""
    return node_fault(pod) == POD_REJECTED


def node_fault(pod: Pod) -> str | None:
    """Return POD_REJECTED or NODE_FAILED for a failure that is due to the node but not marked by Kubernetes as a
    disruption; else None."""
    if pod.phase is not PodPhase.FAILED or pod.disruption is not None:
        return None
    if not pod.has_run:
        return None if pod.reason in _FAULTS_OF_THE_SPEC else POD_REJECTED
    end = pod.termination
    is_lost = end is not None and (
        end.reason == "ContainerStatusUnknown" or (end.exit_code == _UNKNOWN_EXIT_CODE and end.reason == "Unknown")
    )
    return NODE_FAILED if is_lost or pod.reason in _SHUT_DOWN else None


def matches_rule(pod: Pod, rule: RestartRule) -> bool:
    codes = any(has_exit_code(pod, code) for code in rule.on_exit_codes)
    return codes or bool(pod.conditions & set(rule.on_pod_conditions)) or bool(_reasons(pod) & set(rule.on_reasons))


def _verdict(rule: RestartRule, pod: Pod, *, own: bool) -> Verdict:
    said = f" A rule of spec.restart.rules says {rule.action}." if own else ""
    if has_exit_code(pod, ExitCode.INVALID_JOB) and rule.action == "Fail":
        return Verdict("Fail", "InvalidJob", _quote(pod) or f"{_pod_title(pod)} refused the job without a message", pod)
    if _is_out_of_memory(pod):
        return Verdict(rule.action, "OutOfMemory", _memory_sentence(pod) + said, pod)
    if pod.disruption:
        sentence = f"{_pod_title(pod)} on node {pod.node or '(none)'} was disrupted ({pod.disruption})."
        return Verdict(rule.action, "Disrupted", sentence + said, pod)
    if word := node_fault(pod):
        return Verdict(rule.action, word, _node_sentence(pod) + said, pod)
    return Verdict(rule.action, "PodFailed", _fault_sentence(pod) + said, None if has_lost_peer(pod) else pod)


def has_exit_code(pod: Pod, code: int) -> bool:
    end = pod.termination
    if end is None:
        return False
    return end.exit_code == code or (end.message is not None and end.message.exit_code == code)


def _reasons(pod: Pod) -> set[str]:
    return {pod.reason, pod.termination.reason if pod.termination else ""} - {""}


def _origin_first(pod: Pod) -> tuple[bool, str]:
    return has_lost_peer(pod), pod.termination.finished if pod.termination else ""


def _is_out_of_memory(pod: Pod) -> bool:
    return _OUT_OF_MEMORY in _reasons(pod) or has_exit_code(pod, ExitCode.OUT_OF_MEMORY)


def _pod_title(pod: Pod) -> str:
    return f"Pod {pod.name} (worker {pod.index})"


def _quote(pod: Pod) -> str:
    end = pod.termination
    text = (end.message.message if end.message else end.text) if end else pod.complaint
    return shorten(text.strip(), _QUOTED)


def _memory_sentence(pod: Pod) -> str:
    said = pod.termination.message.message if pod.termination and pod.termination.message else ""
    if said:
        return f"{_pod_title(pod)} ran out of memory: {said}".rstrip(".") + "."
    limit = f" of {pod.memory_limit}" if pod.memory_limit else ""
    return (
        f"{_pod_title(pod)} ran out of memory: its container was killed at its memory limit{limit}. Create the job"
        f" again with a higher resources.limits.memory in phase {pod.execution.phase}, or with more"
        " batch.microBatches or workers, so that each pod needs less."
    )


def _node_sentence(pod: Pod) -> str:
    node = f"node {pod.node or '(none)'}"
    if is_rejected_by_node(pod):
        why = f" ({shorten(pod.complaint, _QUOTED)})" if pod.complaint else ""
        return f"{_pod_title(pod)} was rejected by {node} before any of its containers ran{why}."
    reason = (pod.termination.reason if pod.termination else "") or pod.reason
    return f"{_pod_title(pod)} ended together with {node}, which was probably restarted or shut down ({reason})."


def _fault_sentence(pod: Pod) -> str:
    words = _quote(pod)
    return f"{_pod_title(pod)} {_ending(pod.termination)}{': ' + words if words else ''}".rstrip(".") + "."


def _ending(termination: Termination | None) -> str:
    if termination is None:
        return "failed"
    reason = "" if termination.reason in ("", "Error") else f" ({termination.reason})"
    return f"ended with exit code {termination.exit_code}{reason}"


_KILLED = Pod(
    name="killed",
    execution=Execution("any", StageKind.TRAIN, 1),
    index=0,
    phase=PodPhase.FAILED,
    termination=Termination(exit_code=ExitCode.FAILED, reason="Error", text="", message=None),
)
"""A pod as Kubernetes shows it after one of its ranks was killed."""


def allowed_restarts_in_place(restart: Restart, status: PseudoRealJobStatus) -> int:
    """Return the number of restarts in place that an execution may have: spec.restart.inPlace, bounded by the restarts
    that spec.restart.maxRestarts leaves. None are allowed if a rule of the job applies to a pod with a killed rank. The
    used restarts may include faults that are too old to count."""
    if any(matches_rule(_KILLED, rule) for rule in restart.rules):
        return 0
    used = len(status.faults) if restart.window_seconds else status.restarts
    return max(0, min(restart.in_place, restart.max_restarts - used))
