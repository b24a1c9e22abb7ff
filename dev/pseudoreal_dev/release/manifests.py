"""The operator without Helm: a single install.yaml, and a kustomization over it."""

import re
from pathlib import Path

import yaml

from pseudoreal_dev.machine import shell

NAMESPACE = RELEASE = "pseudoreal"
SECRET = "pseudoreal-tls"  # noqa: S105 - a name
UNPUBLISHED = "images.invalid"
"""Registry that exists nowhere (RFC 2606), in the place of the images of a release that are not published."""
_HEAD = """\
# pseudoreal {version}: the definition of PseudoRealJob, and the operator in the namespace pseudoreal.
#   kubectl apply --server-side -f install.yaml
# The operator's pods start once the Secret {secret} has the certificate of the endpoint that training pods report
# to. A key that is published in a file would be no secret, so make one of your own, with openssl or by cert-manager:
{commands}
"""
COMMANDS = f"""\
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=pseudoreal-reports \\
  -addext subjectAltName=DNS:{RELEASE}.{NAMESPACE}.svc -keyout tls.key -out tls.crt
kubectl create secret generic {SECRET} --namespace {NAMESPACE} \\
  --from-file=tls.crt --from-file=tls.key --from-file=ca.crt=tls.crt"""
_IMAGES_UNPUBLISHED = f"""\
# No image of this release was published when this file was made: in it they are called {UNPUBLISHED}/..., which exists
# nowhere. Name your own in kustomization.yaml.
"""
_KUSTOMIZATION = """\
# kubectl kustomize . | kubectl apply --server-side -f -
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [install.yaml]
images:
- {{name: {name}, newName: {name}, {key}: "{value}"}}
patches:
# The image of training pods.
- patch: |
    apiVersion: apps/v1
    kind: Deployment
    metadata: {{name: {release}, namespace: {namespace}}}
    spec:
      template:
        spec:
          containers:
          - name: {container}
            env:
            - {{name: PSEUDOREAL_TRAINER_IMAGE, value: "{trainer}"}}
"""


def install_yaml(helm: Path, chart: Path, version: str, *, published: bool) -> str:
    """Render the chart as one file: the namespace, the definition, and then the rest in the order of Helm."""
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    values = [f"--set=reports.tlsSecret={SECRET}"]
    if not published:
        values += [f"--set={part}.image.repository={UNPUBLISHED}/pseudoreal-{part}" for part in ("operator", "trainer")]
    where = [f"--namespace={NAMESPACE}", "--no-hooks", f"--kube-version={about['kubeVersion'].strip('>=')}"]
    rendered = shell.output([helm, "template", RELEASE, chart, *where, *values])
    namespace = f"apiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAMESPACE}\n"
    documents = [
        document.strip("\n") + "\n" for document in re.split("^---$", rendered, flags=re.MULTILINE) if _kind(document)
    ]
    documents.sort(key=lambda document: _kind(document) != "CustomResourceDefinition")
    commands = "\n".join(f"#   {line}" for line in COMMANDS.splitlines())
    head = _HEAD.format(version=version, secret=SECRET, commands=commands)
    return head + ("" if published else _IMAGES_UNPUBLISHED) + "---\n".join([namespace, *documents])


def kustomization(installed: str) -> str:
    """Return a kustomization over install.yaml, with the images where they can be changed."""
    deployment = next(d for d in yaml.safe_load_all(installed) if d["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    name, separator, version = _parts(container["image"])
    trainer = next(entry["value"] for entry in container["env"] if entry["name"] == "PSEUDOREAL_TRAINER_IMAGE")
    return _KUSTOMIZATION.format(
        name=name,
        key="digest" if separator == "@" else "newTag",
        value=version,
        release=RELEASE,
        namespace=NAMESPACE,
        container=container["name"],
        trainer=trainer,
    )


def _kind(document: str) -> str | None:
    found = re.search(r"^kind: (\w+)$", document, re.MULTILINE)
    return found[1] if found else None


def _parts(image: str) -> tuple[str, str, str]:
    """Split an image into its repository, ":" or "@", and tag or digest."""
    separator = "@" if "@" in image else ":"
    return image.rpartition(separator)
