"""A cluster in containers of Docker, and this project's images on it."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.cluster.preflight import GIB
from pseudoreal_dev.demo.tools import TOOLS, Tool
from pseudoreal_dev.images import docker_images
from pseudoreal_dev.images.images import Image, Target
from pseudoreal_dev.machine import docker, paths
from pseudoreal_dev.machine.docker import Docker
from pseudoreal_dev.machine.errors import DevError, Missing, Problem
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress

CLUSTER = "pseudoreal-demo"
"""Name of the cluster that the demo makes. It is the only one that the demo takes without being told its context."""
CLIENTS = {
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "helm": "https://helm.sh/docs/intro/install",
}
"""Program -> the page that says how it is installed."""
MEMORY_GIB = 4
DISK_GIB = 12
# A cluster that was just created answers at once; containers that Docker has just started need some seconds.
ANSWER_SECONDS = 60


def find_tool() -> Tool | None:
    """Return the first of kind, minikube and k3d that is on the PATH; None if none is."""
    return next((tool for tool in TOOLS if shutil.which(tool.program) and not _refuses_root(tool)), None)


def problems() -> list[Problem]:
    """Return what the demo on kind, minikube or k3d lacks on this machine."""
    return [*_tool_problems(), *client_problems(), *docker_problems()]


def tool_problems(tool: Tool) -> list[Problem]:
    """Return why `tool` cannot load images into a cluster that exists."""
    if shutil.which(tool.program):
        return []
    return [Problem(f"{tool.program} is not on the PATH, which would load the images", f"Install {tool.program}")]


def client_problems() -> list[Problem]:
    missing = [program for program in CLIENTS if not shutil.which(program)]
    return [Problem(f"{program} is not on the PATH", f"Install it: {CLIENTS[program]}") for program in missing]


def docker_problems() -> list[Problem]:
    """Return why Docker cannot build our images and run a cluster with them."""
    try:
        daemon = docker.look()
    except Missing as error:
        return [error.problem]
    return [*_system(daemon), *_memory(daemon), *_disk(daemon)]


def is_loaded(kubernetes: Kubernetes, image: str) -> bool:
    """Return whether all nodes have the image. A node tells a minute after it got an image."""
    nodes = kubernetes.items("nodes")
    return all(image in _names(node["status"].get("images") or ()) for node in nodes)


def start(tool: Tool) -> Kubernetes:
    """Create the demo's cluster, or take the existing one. Raises DevError if it does not answer."""
    log, file = paths.logs() / f"{tool.program}.log", kubeconfig(tool)
    file.parent.mkdir(parents=True, exist_ok=True)
    kubernetes = Kubernetes.of_kubeconfig(file, Path("kubectl"), Path("helm"))
    if CLUSTER in tool.clusters():
        with progress.step(f"taking the {tool.program} cluster {CLUSTER}, which exists", log=log):
            _resume(tool, kubernetes, log)
    else:
        with progress.step(f"creating the {tool.program} cluster {CLUSTER}", cost=Cost.FIRST_RUN, log=log):
            tool.create(CLUSTER, file, log)
            kubernetes.require_answer(ANSWER_SECONDS)
    return kubernetes


def kubeconfig(tool: Tool) -> Path:
    """Return the file that reaches the demo's cluster."""
    return paths.cache() / "demo" / f"{tool.program}.kubeconfig"


def provide_images(tool: Tool, cluster: str, kubernetes: Kubernetes) -> tuple[Image, Image]:
    """Build both images, and load into the cluster those that it lacks. Raises DevError."""
    operator, trainer = (docker_images.build(target) for target in Target)
    for image in (operator, trainer):
        if not is_loaded(kubernetes, image.name):
            _load(tool, cluster, image)
    return operator, trainer


def _load(tool: Tool, cluster: str, image: Image) -> None:
    log, archive = paths.logs() / "image-load.log", paths.images() / f"{image.target}.tar"
    step = progress.step(f"loading the {image.target} image into {cluster}", cost=Cost.FIRST_RUN, log=log)
    with exclusive("images"), step:
        try:
            docker.save(image.name, archive, log)
            tool.load(archive, image.name, cluster, log)
        except DevError as error:
            room = "If a disk is full: `docker system df` shows what Docker holds, `docker builder prune` drops caches"
            raise DevError(f"{image.name} is not in the {tool.program} cluster {cluster}.\n{error}\n{room}") from error
        finally:
            archive.unlink(missing_ok=True)


def _resume(tool: Tool, kubernetes: Kubernetes, log: Path) -> None:
    try:
        tool.resume(CLUSTER, kubeconfig(tool), log)
        kubernetes.require_answer(ANSWER_SECONDS)
    except DevError as error:
        raise DevError(
            f"The {tool.program} cluster {CLUSTER} exists, and does not answer. If its containers are stopped"
            f" (`docker ps --all --filter name={CLUSTER}`), start them with `docker start`. Or delete it with"
            f" `{tool.deletion(CLUSTER)}`; then `make demo` makes another.\n{error}"
        ) from error


def _tool_problems() -> list[Problem]:
    if find_tool():
        return []
    if shutil.which("minikube"):
        return [
            Problem("of kind, minikube and k3d, only minikube is on the PATH, and it refuses root", "Do not use sudo")
        ]
    return [Problem("kind, minikube and k3d are not on the PATH", "Install one of them")]


def _refuses_root(tool: Tool) -> bool:
    return tool.program == "minikube" and os.geteuid() == 0


def _system(daemon: Docker) -> list[Problem]:
    if daemon.system == "linux":
        return []
    return [Problem(f"Docker runs {daemon.system} containers, and the images are for Linux", "Switch it to Linux")]


def _memory(daemon: Docker) -> list[Problem]:
    # What a machine with so much memory has left for Docker is a little less.
    if daemon.memory > (MEMORY_GIB - 0.5) * GIB:
        return []
    has = f"Docker has {daemon.memory / GIB:.1f} GiB of memory, and {MEMORY_GIB} are needed"
    return [Problem(has, "Give it more (Docker Desktop: Settings, Resources)")]


def _disk(daemon: Docker) -> list[Problem]:
    try:
        free = shutil.disk_usage(daemon.root).free
    except OSError:
        return []  # The daemon is on another machine or in a VM, or the folder is closed to this user.
    if free >= DISK_GIB * GIB:
        return []
    has = f"{free / GIB:.0f} GiB are free at {daemon.root}, and {DISK_GIB} are needed"
    return [Problem(has, "Make room, for instance with `docker system prune`")]


def _names(images: Sequence[dict[str, list[str]]]) -> set[str]:
    return {name for image in images for name in image.get("names") or ()}
