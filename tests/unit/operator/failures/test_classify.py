"""Classification of failed executions."""

from typing import Any

import pytest
from pseudoreal_api.spec.recovery import RestartRule
from pseudoreal_api.wire.messages import EXIT_CODES, Outcome, TerminationMessage
from pseudoreal_operator.failures.classify import MissingPods, classify, disappeared_sentence, is_node_at_fault
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import Pod, PodPhase, Termination

EXECUTION = Execution("real", StageKind.TRAIN, 1)
DISRUPTION = frozenset({"DisruptionTarget"})
INVALID = ("Fail", "InvalidJob")
FAULT, MEMORY = ("Restart", "PodFailed"), ("Restart", "OutOfMemory")
YIELDED, DELETED, DISRUPTED = (("RestartIgnoringLimit", word) for word in ("Yielded", "PodsDeleted", "Disrupted"))


def ended_pod(
    index: int, outcome: Outcome, text: str = "", finished: str = "", peer_lost: bool = False, **changes: Any
) -> Pod:
    message = TerminationMessage(outcome=outcome, phase="real", execution=1, message=text, peer_lost=peer_lost)
    code = EXIT_CODES[outcome].value
    phase = PodPhase.SUCCEEDED if code == 0 else PodPhase.FAILED
    values: dict[str, Any] = {"exit_code": code, "reason": "Error", "text": "", "message": message}
    return Pod(f"p{index}", EXECUTION, index, phase, termination=Termination(**(values | changes), finished=finished))


def pod_without_message(index: int, exit_code: int, reason: str = "Error", text: str = "") -> Pod:
    return Pod(f"p{index}", EXECUTION, index, PodPhase.FAILED, termination=Termination(exit_code, reason, text, None))


def preempted_pod(index: int) -> Pod:
    return Pod(
        f"p{index}",
        EXECUTION,
        index,
        PodPhase.FAILED,
        disruption="PreemptionByScheduler: made room",
        conditions=DISRUPTION,
    )


@pytest.mark.parametrize(
    ("pods", "verdict", "says"),
    [
        (
            [ended_pod(0, "InvalidJob", "spec.data.path x is missing")],
            INVALID,
            "spec.data.path x is missing",
        ),
        ([pod_without_message(0, 78)], INVALID, "Pod p0 (worker 0) refused the job"),
        ([ended_pod(0, "Failed", "peer lost"), ended_pod(1, "InvalidJob", "no corpus")], INVALID, "no corpus"),
        ([preempted_pod(0), ended_pod(1, "InvalidJob", "no corpus")], INVALID, "no corpus"),
        ([ended_pod(0, "Yielded")], YIELDED, "Pod p0 (worker 0) was asked to stop"),
        ([ended_pod(0, "Yielded"), ended_pod(1, "Yielded")], YIELDED, "asked to stop"),
        ([pod_without_message(0, 75)], YIELDED, "asked to stop"),
        ([], DELETED, "The pods of the-job were deleted"),
        ([ended_pod(0, "Succeeded")], DELETED, "deleted"),
        ([preempted_pod(1)], DISRUPTED, "PreemptionByScheduler: made room"),
        (
            [ended_pod(0, "Failed", "peer lost"), preempted_pod(1)],
            DISRUPTED,
            "Pod p1 (worker 1) on node (none) was disrupted",
        ),
        ([ended_pod(0, "Failed", "the disk is full")], FAULT, "exit code 1: the disk is full."),
        (
            [ended_pod(0, "Yielded"), ended_pod(1, "Failed", "NaN")],
            FAULT,
            "Pod p1 (worker 1) ended with exit code 1: NaN.",
        ),
        ([pod_without_message(0, 139)], FAULT, "Pod p0 (worker 0) ended with exit code 139."),
        (
            [pod_without_message(0, 128, "StartError", "no such file")],
            FAULT,
            "exit code 128 (StartError): no such file.",
        ),
        ([pod_without_message(0, 137, "OOMKilled")], MEMORY, "resources.limits.memory in phase real"),
        ([ended_pod(0, "OutOfMemory", "it asked for 3 GiB; raise batch.microBatches")], MEMORY, "it asked for 3 GiB"),
        ([preempted_pod(1), pod_without_message(0, 137, "OOMKilled")], MEMORY, "ran out of memory"),
        (
            [ended_pod(0, "Failed", "peer lost"), pod_without_message(1, 137, "OOMKilled")],
            MEMORY,
            "Pod p1 (worker 1) ran out",
        ),
        (
            [Pod("p0", EXECUTION, 0, PodPhase.FAILED, complaint="DeadlineExceeded: too long")],
            FAULT,
            "Pod p0 (worker 0) failed: DeadlineExceeded: too long.",
        ),
    ],
)
def test_classify_returns_the_expected_verdict(pods: list[Pod], verdict: tuple[str, str], says: str) -> None:
    found = classify("the-job", pods)
    assert (found.action, found.reason) == verdict
    assert says in found.sentence


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ([1], "The pod of worker 1 of the-job disappeared without a message, as a deleted pod does"),
        ([1, 3], "The pods of workers 1 and 3 of the-job disappeared without a message, as deleted pods do"),
        ([0, 1, 3], "The pods of workers 0, 1 and 3 of the-job disappeared without a message, as deleted pods do"),
    ],
)
def test_sentence_on_missing_pods_names_each_of_their_workers(workers: list[int], says: str) -> None:
    assert disappeared_sentence("the-job", workers) == f"{says}."
    witness = ended_pod(2, "Failed", "Connection reset by peer", peer_lost=True)
    found = classify("the-job", [witness], missing=MissingPods(workers=workers))
    assert (found.action, found.reason) == DELETED
    lost = "it" if len(workers) == 1 else "them"
    assert found.sentence == f"{says}; Pod p2 (worker 2) lost its connection to {lost}."


REJECTIONS = (
    "UnexpectedAdmissionError", "OutOfcpu", "OutOfnvidia.com/gpu", "NodeAffinity", "NodeShutdown", "NewInKubernetes",
)  # fmt: skip


def pod_on_node(**changes: Any) -> Pod:
    return Pod("p0", EXECUTION, 0, PodPhase.FAILED, node="gpu-1", **changes)


def rejected_pod(reason: str) -> Pod:
    return pod_on_node(reason=reason, complaint=f"{reason}: Pod was rejected", has_run=False)


@pytest.mark.parametrize(
    ("pod", "reason", "says"),
    [
        *((rejected_pod(word), "PodRejected", f"rejected by node gpu-1 before any of its containers ran ({word}: ")
          for word in REJECTIONS),
        (pod_on_node(has_run=False), "PodRejected", "rejected by node gpu-1 before any of its containers ran."),
        (
            pod_on_node(termination=Termination(255, "Unknown", "", None)),
            "NodeFailed",
            "ended together with node gpu-1, which was probably restarted or shut down (Unknown).",
        ),
        (pod_on_node(termination=Termination(137, "ContainerStatusUnknown", "", None)), "NodeFailed", "node gpu-1"),
        (
            pod_on_node(reason="Terminated", complaint="Terminated: imminent node shutdown"),
            "NodeFailed",
            "(Terminated)",
        ),
    ],
)  # fmt: skip
def test_failures_by_the_node_do_not_count(pod: Pod, reason: str, says: str) -> None:
    other = ended_pod(1, "Failed", "Connection reset by peer", peer_lost=True)
    found = classify("the-job", [other, pod])
    assert (found.action, found.reason, found.pod) == ("RestartIgnoringLimit", reason, pod)
    assert says in found.sentence
    assert is_node_at_fault(pod)


@pytest.mark.parametrize(
    "pod",
    [
        rejected_pod("SysctlForbidden"),
        rejected_pod("DeadlineExceeded"),
        pod_on_node(termination=Termination(255, "Error", "", None)),
        pod_on_node(termination=Termination(137, "Error", "", None)),
        pod_on_node(reason="Error", complaint="Error: an init container failed"),
    ],
)
def test_failures_that_any_node_would_cause_count(pod: Pod) -> None:
    assert classify("the-job", [pod]).action == "Restart"
    assert not is_node_at_fault(pod)


def test_rule_of_the_job_may_count_a_node_failure() -> None:
    rule = RestartRule(on_reasons=["OutOfcpu"], action="Restart")
    found = classify("the-job", [rejected_pod("OutOfcpu")], [rule])
    assert (found.action, found.reason) == ("Restart", "PodRejected")


@pytest.mark.parametrize(
    ("rules", "pods", "action"),
    [
        ([{"onExitCodes": [3], "action": "Fail"}], [pod_without_message(0, 3)], "Fail"),
        ([{"onExitCodes": [4], "action": "Fail"}], [pod_without_message(0, 3)], "Restart"),
        (
            [{"onExitCodes": [139], "action": "RestartIgnoringLimit"}],
            [pod_without_message(0, 139)],
            "RestartIgnoringLimit",
        ),
        ([{"onReasons": ["OOMKilled"], "action": "Fail"}], [pod_without_message(0, 137, "OOMKilled")], "Fail"),
        ([{"onPodConditions": ["DisruptionTarget"], "action": "Restart"}], [preempted_pod(0)], "Restart"),
        ([{"onExitCodes": [78], "action": "Restart"}], [ended_pod(0, "InvalidJob", "no")], "Restart"),
        # The first rule wins, whichever pod meets it.
        (
            [{"onExitCodes": [5], "action": "Fail"}, {"onExitCodes": [3], "action": "RestartIgnoringLimit"}],
            [pod_without_message(0, 3), pod_without_message(1, 5)],
            "Fail",
        ),
        (
            [{"onExitCodes": [3], "action": "RestartIgnoringLimit"}, {"onExitCodes": [3, 5], "action": "Fail"}],
            [pod_without_message(0, 3)],
            "RestartIgnoringLimit",
        ),
    ],
)
def test_the_rules_of_the_job_come_first(rules: list[dict[str, Any]], pods: list[Pod], action: str) -> None:
    assert classify("the-job", pods, [RestartRule.model_validate(rule) for rule in rules]).action == action


def test_verdict_has_the_pod_where_the_failure_began() -> None:
    pod = classify("the-job", [ended_pod(0, "Yielded"), pod_without_message(1, 139)]).pod
    assert pod
    assert pod.name == "p1"


def test_the_first_to_fail_is_named() -> None:
    later = ended_pod(0, "Failed", "peer lost", finished="2030-01-01T00:00:09Z")
    first = ended_pod(1, "Failed", "the disk is full", finished="2030-01-01T00:00:08Z")
    assert "the disk is full" in classify("the-job", [later, first]).sentence


@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("rules", [[], [{"onExitCodes": [1], "action": "Restart"}]], ids=str)
def test_pod_that_lost_its_peer_is_not_the_origin_however_early_it_ended(
    origin: int, rules: list[dict[str, Any]]
) -> None:
    peer = ended_pod(1 - origin, "Failed", "Connection reset by peer", finished="2030-01-01T00:00:01Z", peer_lost=True)
    first = ended_pod(origin, "Failed", "local rank 0 was killed", finished="2030-01-01T00:00:09Z")
    found = classify("the-job", [peer, first], [RestartRule.model_validate(rule) for rule in rules])
    assert found.pod is first
    assert "local rank 0 was killed" in found.sentence


def test_failure_has_no_origin_if_all_pods_lost_a_peer() -> None:
    pods = [ended_pod(index, "Failed", "Connection reset by peer", peer_lost=True) for index in range(2)]
    found = classify("the-job", pods)
    assert (found.action, found.reason, found.pod) == ("Restart", "PeerLost", None)
    assert "Connection reset by peer. No pod says why." in found.sentence


def test_long_log_in_a_verdict_is_shortened() -> None:
    sentence = classify("the-job", [pod_without_message(0, 1, text="x" * 5000 + "ValueError: the end")]).sentence
    assert sentence.endswith("ValueError: the end.")
    assert " … " in sentence
    assert len(sentence) < 1000
