"""The cluster's own containerd: its images survive a restart of the cluster, its containers do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.cluster.api import wait_until
from pseudoreal_dev.cluster.network import Host
from pseudoreal_dev.machine import processes, shell
from pseudoreal_dev.machine.processes import Process

CNI_PROGRAMS = "/usr/lib/cni"


@dataclass(frozen=True)
class Containerd:
    """containerd in the network namespace of the node `host`. Images are below `root`, all other files below `run`."""

    root: Path
    run: Path
    host: Host

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def network_configuration(self) -> Path:
        return self.run / "cni"

    def start(self, sandbox_image: str) -> Process:
        """Start containerd, and remove containers of an earlier run. Raises DevError if containerd does not answer."""
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "config.toml").write_text(_configuration(self, sandbox_image))
        process = self._launch()
        if self.names_of("containers"):
            # A killed cluster leaves container records. The CRI plugin reads the records only at its start, so remove
            # them and restart.
            self.remove_containers()
            self.stop()
            process = self._launch()
        return process

    def pause(self) -> None:
        """Stop containerd alone: its containers keep running, and `resume` finds them."""
        processes.stop(self.processes, self._records)

    def resume(self) -> None:
        """Start containerd again. Raises DevError if containerd does not answer."""
        self._launch()

    def stop(self) -> None:
        """Stop containerd and its shims."""
        self.pause()
        # Without containerd, a shim would run forever.
        shims = [pid for pid, words in processes.command_lines() if _is_shim(words) and str(self.socket) in words]
        processes.kill(shims)

    @property
    def processes(self) -> list[Process]:
        """Started processes, whether still running or not."""
        return processes.recorded(self._records)

    def client(self, *words: str) -> list[str]:
        """Return the command line of a `ctr` command on the kubelet's images and containers."""
        return ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", *words]

    def names_of(self, what: str) -> list[str]:
        """Return the names of all objects of a kind: containers, tasks, images, or content (as digests)."""
        return shell.output(self.client(what, "list", "-q")).split()

    def remove_containers(self) -> None:
        """Remove all containers and their file systems."""
        for task in self.names_of("tasks"):
            shell.succeeds(self.client("tasks", "delete", "--force", task))
        if containers := self.names_of("containers"):
            shell.output(self.client("containers", "delete", *containers))

    def image_targets(self) -> dict[str, str]:
        """Return image name -> digest."""
        lines = shell.output(self.client("images", "list")).splitlines()[1:]
        return {words[0]: words[2] for words in map(str.split, lines)}

    def remove_images(self, names: Sequence[str]) -> None:
        """Remove image names, and free the content needed by no other image."""
        if names:
            shell.output(self.client("images", "delete", "--sync", *names))

    def answers(self) -> bool:
        """Return whether containerd answers requests."""
        return self.socket.exists() and shell.succeeds(self.client("version"))

    def _launch(self) -> Process:
        command = [*self.host.inside, "containerd", "--config", str(self.run / "config.toml")]
        log = self.run.parent / "logs" / f"{self.run.name}.log"
        process = processes.launch("containerd", command, records=self._records, log=log)
        wait_until(self.answers, "containerd answers", [process])
        return process

    @property
    def _records(self) -> Path:
        return self.run / "processes"


def _is_shim(words: list[str]) -> bool:
    return bool(words) and Path(words[0]).name.startswith("containerd-shim")


def _configuration(containerd: Containerd, sandbox_image: str) -> str:
    return f"""\
version = 2
root = "{containerd.root}"
state = "{containerd.run / "state"}"

[grpc]
  address = "{containerd.socket}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{containerd.run / "opt"}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  # Without CAP_SYS_RESOURCE, as in many virtual machines, runc cannot lower the score and no pod starts.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI_PROGRAMS}"
  conf_dir = "{containerd.network_configuration}"
"""
