# Three images from one file: `operator` (small, no torch), `trainer`, and `trainer-compiler` for jobs that compile.
# `--build-arg TORCH=cpu` makes a trainer for machines without a GPU: 1 GB in place of 6.
# Any Debian-like base with python3 >= 3.11 and its venv module will do. `make pin-base` asks for the digest of the day.
ARG BASE_IMAGE=docker.io/library/python:3.12-slim@sha256:3ecf5ebe01fef4b6e81be34511fb40bf378ea7fd81ab215ba15b2775ef85413d
# Stated by pyproject.toml, and written here by `make generate`.
ARG VERSION=0.4.0-dev.0

FROM ${BASE_IMAGE} AS base
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Lines of sources.list in place of the base's own, for instance those of a snapshot of Debian: the same packages every time.
ARG APT_SOURCES=
# Seconds, in place of the time of the build: Python's compiled files and the user's entry get it, so the bytes are the same.
ARG SOURCE_DATE_EPOCH
# torch asks for the name of the user, so the numeric id that the pods run under needs an entry.
RUN if [ -n "$APT_SOURCES" ]; then rm -f /etc/apt/sources.list.d/*; echo "$APT_SOURCES" > /etc/apt/sources.list; fi \
 && groupadd --gid 10001 pseudoreal \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pseudoreal \
 && python3 -m venv /opt/venv

FROM base AS operator
ARG SOURCE_DATE_EPOCH
COPY requirements/operator.txt /tmp/requirements.txt
RUN pip install --require-hashes -r /tmp/requirements.txt
COPY dev/pseudoreal_dev/images/licences.py /tmp/licences.py
RUN python /tmp/licences.py /usr/share/licenses
COPY LICENSE NOTICE /usr/share/licenses/pseudoreal/
COPY crds/pseudoreal_api /app/pseudoreal_api
COPY operator/pseudoreal_operator /app/pseudoreal_operator
ARG BASE_IMAGE
ARG VERSION
LABEL org.opencontainers.image.title="pseudoreal operator" \
      org.opencontainers.image.description="The Kubernetes operator that runs PseudoRealJobs" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.base.name=$BASE_IMAGE
USER 10001:10001
ENTRYPOINT ["python", "-m", "pseudoreal_operator"]

# The quickstart's text: the King James Bible (public domain) from Debian's package of that name.
FROM base AS corpus
COPY examples/corpus.sh /tmp/corpus.sh
RUN apt-get update -qq && bash /tmp/corpus.sh /corpus

FROM base AS trainer
ARG SOURCE_DATE_EPOCH
COPY requirements/trainer.txt /tmp/requirements/trainer.txt
COPY requirements/trainer-cpu.txt /tmp/requirements/trainer-cpu.txt
COPY requirements/uv.txt /tmp/requirements/uv.txt
# cuda: torch with NVIDIA's libraries, as the Python index has it. cpu: torch without them, from the index of its authors.
ARG TORCH=cuda
# uv unpacks torch's 5 GB in a fraction of pip's time; it does not stay in the image.
RUN pip install --require-hashes -r /tmp/requirements/uv.txt \
 && case "$TORCH" in \
      cuda) uv pip install --system-certs --no-cache --compile-bytecode --require-hashes -r /tmp/requirements/trainer.txt ;; \
      cpu) uv pip install --system-certs --no-cache --compile-bytecode --no-deps --torch-backend cpu -r /tmp/requirements/trainer-cpu.txt ;; \
      *) echo "TORCH is '$TORCH'; give cuda or cpu" >&2; exit 1 ;; \
    esac \
 && pip uninstall --yes uv
COPY dev/pseudoreal_dev/images/licences.py /tmp/licences.py
RUN python /tmp/licences.py /usr/share/licenses
COPY LICENSE NOTICE /usr/share/licenses/pseudoreal/
# OpenShift chooses ids that have no entry: then USER is the name that torch asks for.
# No NVIDIA_VISIBLE_DEVICES: the device plugin names the GPUs that a pod asked for, and a pod that asked for none gets none.
ENV USER=pseudoreal NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
COPY --from=corpus /corpus /workspace/corpus
COPY crds/pseudoreal_api /app/pseudoreal_api
COPY trainer/pseudoreal_trainer /app/pseudoreal_trainer
ARG BASE_IMAGE
ARG VERSION
LABEL org.opencontainers.image.title="pseudoreal trainer" \
      org.opencontainers.image.description="The PyTorch trainer in the pods of PseudoRealJobs" \
      org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.base.name=$BASE_IMAGE
USER 10001:10001
ENTRYPOINT ["python", "-m", "pseudoreal_trainer.cli.pod"]

# `compile: {mode: Blocks}`: Triton compiles a C program against Python's headers. 0.37 GB that no other job needs.
FROM trainer AS trainer-compiler
USER 0
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
 && apt-get update -qq \
 && apt-get install -qq --yes --no-install-recommends gcc libc6-dev $([ -e "$headers/Python.h" ] || echo python3-dev) \
 && rm -rf /var/lib/apt/lists/* \
 && echo '#include <Python.h>' | gcc -fsyntax-only -I"$headers" -x c -
USER 10001:10001
