"""Commands of `python -m pseudoreal_dev`."""

import errno
import sys
from datetime import UTC, datetime
from typing import NoReturn

import click

from pseudoreal_dev import generated, hosting
from pseudoreal_dev.bundle import bundle
from pseudoreal_dev.cluster import binaries, cluster, preflight
from pseudoreal_dev.demo import demo, target
from pseudoreal_dev.images import images, pin
from pseudoreal_dev.krew import plugin
from pseudoreal_dev.machine import ownership, packages
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress
from pseudoreal_dev.release import changelog, chart_readme, release
from pseudoreal_dev.release.oci_images import Variant


@click.group(help="A real single-node Kubernetes on this machine, and the images that run on it.")
def commands() -> None:
    pass


@commands.command(help="Bring the cluster up, or leave a healthy one alone.")
def cluster_up() -> None:
    _prepare()
    found = cluster.up()
    progress.console.print(progress.table())
    progress.console.print(f"export KUBECONFIG={found.kubeconfig}\nkubectl of the same version: {found.kubectl}")


@commands.command(help="End the cluster; its images and programs stay in the cache.")
def cluster_down() -> None:
    cluster.down()


@commands.command(help="Say what runs and what is wrong; exit code 1 unless all is well.")
def cluster_status() -> None:
    found = cluster.status()
    for process, is_running in found.processes:
        progress.console.print(f"{process.name:24} {process.pid:>8} {'runs' if is_running else 'ended'}")
    progress.console.print(found.problem or "the cluster is healthy")
    sys.exit(1 if found.problem else 0)


@commands.command("binaries", help="Build the cluster's programs.")
def build_binaries() -> None:
    _prepare()
    progress.console.print(str(binaries.build().folder))


@commands.command("images", help="Build both images, and load them if the cluster is up.")
@click.option("--export", is_flag=True, help="Without a cluster: write what loading them will need.")
def build_images(export: bool) -> None:
    _prepare()
    for wanted in images.Target:
        built = images.build(wanted)
        progress.console.print(built.name)
        running = None if cluster.status().problem else cluster.containerd()
        if running:
            images.load(built, running)
        elif export:
            images.export(built)
        images.drop_older(built, running)


@commands.command(help="Write the digest that a registry has for the base image into the Dockerfile.")
@click.argument("image", required=False)
def pin_base(image: str | None) -> None:
    packages.install_missing({"skopeo": "skopeo"})
    progress.console.print(f"the images' base is {pin.write(image)}")


@commands.command("prepare", help="Bring the cluster up with both images on it, and nothing more.")
def prepare_cluster() -> None:
    target.local()


@commands.command("demo", help="Train an example on a real Kubernetes.")
@click.argument("name", type=click.Choice([*demo.DEMOS]), default="quickstart")
def run_demo(name: str) -> None:
    demo.run(name)


@commands.command("gpu-bundle", help="Make .gpu-bundle/: tests and benchmark for a machine with a GPU and no network.")
def make_gpu_bundle() -> None:
    bundle.make()


@commands.command(help="Make .krew/: the plugin of kubectl and the manifest with which krew installs it.")
@click.argument("url")
@click.argument("homepage")
def krew(url: str, homepage: str) -> None:
    folder = plugin.make(url, homepage)
    progress.console.print(f"{folder / plugin.MANIFEST}\n{folder / plugin.ARCHIVE}: to be published as {url}")


@commands.command("cut", help="Write the version of a release into all files, and its date into the changelog.")
@click.argument("version")
def cut_release(version: str) -> None:
    changelog.cut(version, datetime.now(UTC).date())
    chart_readme.write()
    progress.console.print(f"read the changes, and commit them as the release {version}")


@commands.command("release", help="Make dist/: everything that a release of this commit publishes.")
@click.option("--version", default="", help="The version, which pyproject.toml must state.")
@click.option("--images", "registry", default="", help="Registry and path where the images will be published.")
@click.option("--targets", default=" ".join(Variant), help="The images to build, with spaces between them.")
@click.option("--base", type=click.Choice(["pinned", "local"]), default="pinned", help="What the images are based on.")
@click.option("--url", default="", help="Where the archive for krew will be published.")
@click.option("--homepage", default="", help="The project's page.")
@click.option(
    "--source", default="", help="Where the source is published: for the images' labels and the notes' links."
)
def make_release(version: str, registry: str, targets: str, base: str, url: str, homepage: str, source: str) -> None:
    unknown = [name for name in targets.split() if name not in [*Variant]]
    if unknown:
        raise DevError(f"TARGETS names {', '.join(unknown)}; the images are {', '.join(Variant)}")
    variants = [Variant(name) for name in targets.split()]
    wishes = release.Wishes(version, registry, variants, base == "local", url, homepage, source)
    progress.say(release.listing(release.make(wishes)))


@commands.command(help="Fail if a file that `make generate` writes is stale.")
def check_generated() -> None:
    generated.check()


@commands.command(help="Fail if the hosting platform would not understand a workflow, a form or CITATION.cff.")
def check_hosting() -> None:
    hosting.check()


def main() -> None:
    """Run the command line; a DevError and a full disk are printed without a traceback."""
    try:
        commands(prog_name="pseudoreal-dev")
    except DevError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"{error}. Make room, or set PSEUDOREAL_CACHE to a folder on a larger disk")
    finally:
        ownership.give_back()


def _fail(message: str) -> NoReturn:
    progress.console.print(message, style="red", markup=False)
    sys.exit(1)


def _prepare() -> None:
    preflight.require()
    packages.install_missing()
