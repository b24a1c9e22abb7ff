"""A containerd of the cluster's own: its images stay from one start to the next, its containers do not."""

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
    """A containerd whose images lie below `root` and everything else below `run`; it runs in its node's network."""

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
        """Starts containerd without any container of an earlier run. Raises DevError if it does not answer."""
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "config.toml").write_text(_configuration(self, sandbox_image))
        process = self._launch()
        if self.names_of("containers"):
            # Killed clusters leave records. The CRI part read them at its start: it must read again without them.
            self.remove_containers()
            self.stop()
            process = self._launch()
        return process

    def pause(self) -> None:
        """Ends containerd alone: its containers run on, and `resume` finds them."""
        processes.stop(self.processes, self._records)

    def resume(self) -> None:
        """Starts it again. Raises DevError if it does not answer."""
        self._launch()

    def stop(self) -> None:
        """Ends containerd and the shims that it started."""
        self.pause()
        # Without containerd a shim stays for ever.
        shims = [pid for pid, words in processes.command_lines() if _is_shim(words) and str(self.socket) in words]
        processes.kill(shims)

    @property
    def processes(self) -> list[Process]:
        """What was started, running or not."""
        return processes.recorded(self._records)

    def client(self, *words: str) -> list[str]:
        """The command line of a `ctr` command for the kubelet's images and containers."""
        return ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", *words]

    def names_of(self, what: str) -> list[str]:
        """The names of all `what`: containers, tasks, images or (their digests) content."""
        return shell.output(self.client(what, "list", "-q")).split()

    def remove_containers(self) -> None:
        """Removes all containers and their file systems."""
        for task in self.names_of("tasks"):
            shell.succeeds(self.client("tasks", "delete", "--force", task))
        if containers := self.names_of("containers"):
            shell.output(self.client("containers", "delete", *containers))

    def image_targets(self) -> dict[str, str]:
        """The digest that each image name stands for."""
        lines = shell.output(self.client("images", "list")).splitlines()[1:]
        return {words[0]: words[2] for words in map(str.split, lines)}

    def remove_images(self, names: Sequence[str]) -> None:
        """Forgets images, and frees what no other image needs."""
        if names:
            shell.output(self.client("images", "delete", "--sync", *names))

    def answers(self) -> bool:
        """Whether it can be talked to."""
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
