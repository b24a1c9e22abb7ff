# Two images from one file: `operator` (small, no torch) and `trainer`.
# Any Debian-like base with python3 >= 3.11 and its venv module will do. `make pin-base` asks for the digest of the day.
ARG BASE_IMAGE=python:3.12-slim@sha256:3ecf5ebe01fef4b6e81be34511fb40bf378ea7fd81ab215ba15b2775ef85413d

FROM ${BASE_IMAGE} AS base
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Lines of sources.list in place of the base's own, for instance those of a snapshot of Debian: the same packages every time.
ARG APT_SOURCES=
# torch asks for the name of the user, so the numeric id that the pods run under needs an entry.
RUN if [ -n "$APT_SOURCES" ]; then rm -f /etc/apt/sources.list.d/*; echo "$APT_SOURCES" > /etc/apt/sources.list; fi \
 && groupadd --gid 10001 pseudoreal \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pseudoreal \
 && python3 -m venv /opt/venv

FROM base AS operator
COPY requirements/operator.txt /tmp/requirements.txt
RUN pip install --require-hashes -r /tmp/requirements.txt
COPY crds/pseudoreal_api /app/pseudoreal_api
COPY operator/pseudoreal_operator /app/pseudoreal_operator
USER 10001:10001
ENTRYPOINT ["python", "-m", "pseudoreal_operator"]

# The quickstart's text: the King James Bible (public domain) from Debian's package of that name.
FROM base AS corpus
COPY examples/corpus.sh /tmp/corpus.sh
RUN apt-get update -qq && bash /tmp/corpus.sh /corpus

FROM base AS trainer
COPY requirements/trainer.txt /tmp/requirements.txt
COPY requirements/uv.txt /tmp/uv.txt
# uv unpacks torch's 5 GB in a fraction of pip's time; it does not stay in the image.
RUN pip install --require-hashes -r /tmp/uv.txt \
 && uv pip install --system-certs --no-cache --compile-bytecode --require-hashes -r /tmp/requirements.txt \
 && pip uninstall --yes uv
# `compile: true`: Triton compiles a C program against Python's headers. at most 0.37 GB of 6.35 GB.
RUN headers="$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
 && apt-get update -qq \
 && apt-get install -qq --yes --no-install-recommends gcc libc6-dev $([ -e "$headers/Python.h" ] || echo python3-dev) \
 && rm -rf /var/lib/apt/lists/* \
 && echo '#include <Python.h>' | gcc -fsyntax-only -I"$headers" -x c -
# OpenShift chooses ids that have no entry: then USER is the name that torch asks for.
ENV USER=pseudoreal NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
COPY --from=corpus /corpus /workspace/corpus
COPY crds/pseudoreal_api /app/pseudoreal_api
COPY trainer/pseudoreal_trainer /app/pseudoreal_trainer
USER 10001:10001
ENTRYPOINT ["python", "-m", "pseudoreal_trainer.cli.pod"]
