"""Docker, and the programs that run clusters in it, as `Programs`: what they build and create, they remember.

Their answers are those of Docker 29, kind 0.31, minikube 1.37 and k3d 5.8, as far as the demo reads them.
"""

from collections.abc import Mapping

from tests.unit.dev.support.programs import Programs

DAEMON = '{"ServerVersion":"29.1.3","OSType":"linux","MemTotal":8218034176,"DockerRootDir":"/nowhere/docker"}'
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
DOCKER: Mapping[str, str] = {
    "info*": f"echo '{DAEMON}'",
    "image inspect *": '[ -e "$STATE/${3##*/}" ]',
    "build *": 'while [ "$1" != --tag ]; do shift; done; : > "$STATE/${2##*/}"',
    "image save *": ': > "$4"',
}
KIND: Mapping[str, str] = {
    "get clusters": '[ -e "$STATE/kind" ] && echo pseudoreal-demo || echo "No kind clusters found." >&2',
    "create cluster *": ': > "$STATE/kind"',
}
MINIKUBE: Mapping[str, str] = {
    "profile list*": """[ -e "$STATE/minikube" ] && echo '{"valid":[{"Name":"pseudoreal-demo"}],"invalid":[]}' """
    """|| echo '{"invalid":[],"valid":[]}'""",
    "start *": ': > "$STATE/minikube"',
    "image load *": ': > "$STATE/loaded"',
    # As it is loaded, so it is listed.
    "image ls *": 'for image in "$STATE"/pseudoreal-*; do echo "localhost/${image##*/}"; done',
}
K3D: Mapping[str, str] = {
    "cluster list*": '[ -e "$STATE/k3d" ] && echo "pseudoreal-demo   1/1   0/0   true" || :',
    "cluster create *": ': > "$STATE/k3d"',
    "kubeconfig get *": "echo 'kind: Config'",
}
TOOLS = {"kind": KIND, "minikube": MINIKUBE, "k3d": K3D}
KUBECTL: Mapping[str, str] = {
    "*get --raw=/readyz*": "echo ok",
    "*get nodes*": """echo '{"items":[{"status":{"images":[]}}]}'""",
}


def add(programs: Programs, *names: str) -> None:
    """Add programs by their names: docker, kind, minikube, k3d, kubectl, helm."""
    known = {"docker": DOCKER, "kubectl": KUBECTL, "helm": {}, **TOOLS}
    for name in names:
        programs.add(name, known[name])
