"""Requests to the API server, as the operator and the command line send them."""

import pytest
from pseudoreal_api import kubernetes_requests


@pytest.mark.parametrize(
    ("kind", "namespace", "rest", "path"),
    [
        ("Pod", None, (), "/api/v1/pods"),
        ("Node", None, ("n",), "/api/v1/nodes/n"),
        ("Pod", "team", ("p", "log"), "/api/v1/namespaces/team/pods/p/log"),
        ("PseudoRealJob", "team", ("", ""), "/apis/pseudoreal.dev/v1alpha1/namespaces/team/pseudorealjobs"),
        ("PodGroup a.io/v1", "team", ("g",), "/apis/a.io/v1/namespaces/team/podgroups/g"),
    ],
)
def test_path_has_group_version_namespace_and_name(kind: str, namespace: str, rest: tuple[str], path: str) -> None:
    assert kubernetes_requests.path_of(kind, namespace, *rest) == path


@pytest.mark.parametrize("name", ["../secrets/s", "a?watch=true", "a#b", "a/b"])
def test_a_name_from_the_command_line_cannot_leave_its_collection(name: str) -> None:
    path = kubernetes_requests.get("PseudoRealJob", "team", name).path
    assert path.startswith("/apis/pseudoreal.dev/v1alpha1/namespaces/team/pseudorealjobs/")
    assert path.count("/") == 7
    assert not {*"?#"} & {*path}


def test_each_page_after_the_first_names_the_page_before_it() -> None:
    request = kubernetes_requests.list_of("Pod", "team", "job=llm", fields="status.phase!=Failed")
    selectors = (("labelSelector", "job=llm"), ("fieldSelector", "status.phase!=Failed"))
    assert request.page(500, None).query == (*selectors, ("limit", "500"))
    assert request.page(62, "token").query == (*selectors, ("limit", "62"), ("continue", "token"))


def test_deletion_options_are_in_the_body() -> None:
    """With a body, the API server ignores the options of the query."""
    request = kubernetes_requests.delete("Job", "team", "j", "uid", 5)
    assert request.query == ()
    assert request.body == {
        "propagationPolicy": "Background",
        "preconditions": {"uid": "uid"},
        "gracePeriodSeconds": 5,
    }
