# `make help` lists the targets. A target installs the Python packages that it needs itself, into an environment in the tree.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= passive
# The tests start Python hundreds of times: without its compiled files, torch takes twice as long to import.
unexport PYTHONDONTWRITEBYTECODE
# An index that is asked while it changes may answer once with an error; three tries get past that.
UV_INSTALL = for try in 1 2 3; do $(BIN)/uv pip install --quiet --python $(or $(2),$(BIN)/python) $(1) && break; test $$try -lt 3; done

PROJECT = --no-deps --build-constraints requirements/build.txt --editable .

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

# pip and uv take only files with the hashes in requirements/; so does uv when it builds this project.
$(BIN)/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is no Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make environments; install python3-venv, or name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv && $(BIN)/pip install --quiet --require-hashes -r requirements/uv.txt && touch $@

.venv/tools: requirements/dev.txt pyproject.toml | $(BIN)/uv
	@echo "installing the development tools into .venv"
	@$(call UV_INSTALL,--require-hashes -r requirements/dev.txt)
	@$(call UV_INSTALL,$(PROJECT))
	@touch $@

.venv/all: requirements/all.txt .venv/tools
	@echo "installing torch and the rest into .venv (5 GB; one to two minutes)"
	@$(call UV_INSTALL,--require-hashes -r requirements/all.txt)
	@touch $@

.PHONY: venv
venv: .venv/all ## Make .venv with everything: operator, trainer, tools

.PHONY: demo
# DEMO=llama judges the exported model with torch and transformers.
demo: .venv/tools $(if $(filter llama,$(DEMO)),.venv/all) ## Train the quickstart, or DEMO=llama, on kind, minikube, k3d or a Kubernetes of its own (or on KUBE_CONTEXT=name)
	@$(BIN)/python -m pseudoreal_dev demo $(DEMO)

.PHONY: cluster-up cluster-down cluster-status images
cluster-up: .venv/tools ## Bring up the local Kubernetes
	@$(BIN)/python -m pseudoreal_dev cluster-up
cluster-down: .venv/tools ## Stop the local Kubernetes; images and programs stay in the cache
	@$(BIN)/python -m pseudoreal_dev cluster-down
cluster-status: .venv/tools ## Say whether the local Kubernetes runs
	@$(BIN)/python -m pseudoreal_dev cluster-status
images: .venv/tools ## Build both images and load them into the local Kubernetes, if it runs
	@$(BIN)/python -m pseudoreal_dev images

.PHONY: corpus
corpus: ## Fetch the quickstart's text into examples/corpus
	@bash examples/corpus.sh examples/corpus

# What a local run needs has an environment of its own, a tenth of .venv. PyPI's torch for Linux is the one for CUDA; uv
# knows where torch's project keeps the one for CPUs, which is taken where it can be reached and there is no GPU. Its
# version is pinned; its files have no hashes in requirements/, as PyPI's have.
RUN := .venv-run/bin
TORCH = torch==$(shell sed -n 's/^torch==\([^ ]*\).*/\1/p' requirements/torch.txt)
CPU_TORCH = $(BIN)/uv pip install --quiet --python $(RUN)/python --no-deps --torch-backend cpu $(TORCH)
.venv-run/ready: requirements/run.txt requirements/torch.txt pyproject.toml | $(BIN)/uv
	@echo "installing what a local run needs into .venv-run"
	@test -x $(RUN)/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-run
	@$(call UV_INSTALL,--require-hashes -r requirements/run.txt,$(RUN)/python)
	@$(call UV_INSTALL,$(PROJECT),$(RUN)/python)
	@if test "$$(uname -s)" = Linux && ! command -v nvidia-smi > /dev/null && \
	  UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 $(CPU_TORCH) --dry-run 2> /dev/null; then \
	  echo "installing torch for CPUs (0.2 GB to download)"; $(CPU_TORCH); \
	else \
	  test "$$(uname -s)" != Linux || echo "installing torch for CUDA, PyPI's only one for Linux (some 3 GB to download, 5 GB on disk)"; \
	  $(call UV_INSTALL,--require-hashes -r requirements/torch.txt,$(RUN)/python); \
	fi
	@touch $@

.venv-run/tests: requirements/test.txt .venv-run/ready
	@$(call UV_INSTALL,--require-hashes -r requirements/test.txt,$(RUN)/python)
	@touch $@

# JOB: another job file.
JOB = examples/laptop.yaml
.PHONY: run
run: .venv-run/ready ## Train a small transformer here, without a cluster: two to six minutes on two cores; JOB=another.yaml
	@$(RUN)/pseudoreal run $(JOB) --workdir pseudoreal-runs/$$(date +%Y%m%d-%H%M%S)

.PHONY: generate
generate: .venv/tools ## Write the types of Kubernetes, the CRD, its policy, its schema for editors and its reference, the charts' READMEs, the version, and docs/tested.md
	@$(BIN)/python -m pseudoreal_dev.kubernetes_types
	@$(BIN)/python -m pseudoreal_api.publish.crd crds charts/pseudoreal/files
	@$(BIN)/python -m pseudoreal_api.publish.policy crds charts/pseudoreal/files
	@$(BIN)/python -m pseudoreal_api.publish.reference docs/manifest.md
	@$(BIN)/python -m pseudoreal_api.publish.editor charts/pseudoreal/files/pseudorealjob.schema.json
	@$(BIN)/python -m pseudoreal_dev.machine.version
	@$(BIN)/python -m pseudoreal_dev.release.chart_readme
	@$(BIN)/python -m pseudoreal_dev.tested

.PHONY: lint format
lint: venv sbom ## ruff with the rules of bandit, mypy, the generated files, the workflows, the lists of the images' packages, and whether the tests that need a GPU can be imported
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pseudoreal_dev check-generated
	$(BIN)/python -m pseudoreal_dev check-hosting
	$(BIN)/pytest --collect-only -q tests/gpu > /dev/null || $(BIN)/pytest --collect-only -q tests/gpu
format: .venv/tools ## Format the Python files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What reads requirements has requirements of its own.
.venv-audit/ready: requirements/audit.txt | $(BIN)/uv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-audit
	@$(call UV_INSTALL,--require-hashes -r requirements/audit.txt,.venv-audit/bin/python)
	@touch $@

# OSV_URL: the service that is asked, if it is not osv.dev's.
.PHONY: sbom audit pin-base
sbom: .venv-audit/ready ## Write the Python packages of the images into .sbom/, as CycloneDX
	@mkdir -p .sbom
	@for image in operator trainer trainer-cpu; do PYTHONWARNINGS=ignore .venv-audit/bin/cyclonedx-py requirements --output-reproducible --no-validate \
	  --pyproject pyproject.toml -o .sbom/$$image.cdx.json requirements/$$image.txt || exit 1; done
audit: .venv-audit/ready ## Ask osv.dev for advisories about the Python packages of the images, the client and the build; needs the network
	@failed=; for part in operator trainer client uv build; do echo "requirements/$$part.txt:"; .venv-audit/bin/pip-audit --strict \
	  --disable-pip --require-hashes --vulnerability-service osv $(if $(OSV_URL),--osv-url $(OSV_URL)) -r requirements/$$part.txt || failed=1; \
	  done; test -z "$$failed"
# BASE: the image, by a tag; without it that of the Dockerfile is looked up again.
pin-base: .venv/tools ## Ask a registry for the digest of the images' base, and write it into the Dockerfile
	@$(BIN)/python -m pseudoreal_dev pin-base $(BASE)

.venv-site/ready: requirements/site.txt | $(BIN)/uv
	@echo "installing MkDocs into .venv-site (130 MB)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-site
	@$(call UV_INSTALL,--require-hashes -r requirements/site.txt,.venv-site/bin/python)
	@touch $@

# SITE_VERSION: name of a version, such as 0.4. BRANCH: where mike keeps all versions; the working tree does not change.
.PHONY: site site-version
BRANCH = gh-pages
site: .venv-site/ready ## Build the site of the documents into .site/, which opens from a disk and needs no network
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict
	@echo "open .site/index.html"
site-version: .venv-site/ready ## Commit the site as a version to a branch, SITE_VERSION=0.4 BRANCH=gh-pages; publishes nothing
	@test -n "$(SITE_VERSION)" || { echo "name the version: make site-version SITE_VERSION=0.4" >&2; exit 1; }
	@# mike calls the mkdocs that it finds.
	@export PATH="$(CURDIR)/.venv-site/bin:$$PATH" NO_MKDOCS_2_WARNING=1; \
	  mike deploy --branch $(BRANCH) --update-aliases $(SITE_VERSION) latest && mike set-default --branch $(BRANCH) latest

# MARKS cuts parts away, for instance MARKS='not e2e'.
.PHONY: test test-deep test-unit test-integration test-minors test-chaos test-e2e test-faults test-gpu
test: venv corpus .venv-site/ready ## All tests: unit, real API server, real cluster
	$(BIN)/python -m tests.support.suite $(if $(MARKS),-m '$(MARKS)')
test-deep: venv corpus .venv-site/ready ## The same with all that is long, full budgets and new random seeds (three hours)
	$(BIN)/python -m tests.support.suite --deep $(if $(MARKS),-m '$(MARKS)')
test-unit: .venv-run/tests ## The tests that need Python, the packages of `make run` and of the operator, and pytest; the others skip with a sentence
	$(RUN)/python -m pytest tests/unit
test-integration: venv ## The tests against a real API server, and against servers that stand for object storage
	$(BIN)/pytest tests/integration
	$(BIN)/pytest tests/clouds
# KUBERNETES: one of these minor versions; without it, each of them.
MINORS = $(patsubst dev/tools/kubernetes-%,%,$(wildcard dev/tools/kubernetes-*))
test-minors: venv ## The tests of the API against API servers of other minor versions, KUBERNETES=1.30
	@for minor in $(or $(KUBERNETES),$(MINORS)); do echo "Kubernetes $$minor:"; \
	  PSEUDOREAL_KUBERNETES=$$minor $(BIN)/pytest tests/integration -m 'minors and not solo' || exit 1; done
test-chaos: venv ## Every fault at every request of a job's life (an hour)
	$(BIN)/pytest --deep -s tests/integration/operator/chaos/test_faults_at_requests.py -k each_fault
test-e2e: venv corpus ## The tests on a real cluster; needs root
	$(BIN)/pytest tests/e2e
test-faults: venv ## Everything that can befall a job on a real cluster (half an hour); needs root
	$(BIN)/pytest --deep tests/e2e/faults
test-gpu: venv ## Run what needs a GPU; skips with a sentence without one
	$(BIN)/pytest tests/gpu

# URL: where the archive will be published; HOMEPAGE: that of the project.
.PHONY: krew
krew: .venv/tools ## Make .krew/: `kubectl pseudoreal` for krew, URL=... HOMEPAGE=...
	@$(BIN)/python -m pseudoreal_dev krew $(URL) $(HOMEPAGE)

# VERSION: of the release; a version under development is made only if it is named here. IMAGES: registry and path where the
# images will be published; the charts name them. TARGETS: some of the images. BASE=local: on Debian made here, where the
# pinned image cannot be pulled. URL, HOMEPAGE: for krew. SOURCE: where the source is published.
.PHONY: cut release
cut: .venv/tools ## Write the version and the date of a release into all files, VERSION=0.4.0
	@$(BIN)/python -m pseudoreal_dev cut $(VERSION)
release: .venv/tools sbom ## Make dist/: wheels, charts, images, install.yaml, krew archive, SBOMs and checksums of this commit
	@$(BIN)/python -m pseudoreal_dev release $(VERSION:%=--version %) $(IMAGES:%=--images %) $(if $(TARGETS),--targets '$(TARGETS)') \
	  $(BASE:%=--base %) $(URL:%=--url %) $(HOMEPAGE:%=--homepage %) $(SOURCE:%=--source %)

.PHONY: gpu-bundle gpu-report
gpu-bundle: .venv/tools ## Make .gpu-bundle/: tests, benchmark and the trials at 124 M for a machine with a GPU and no network
	@$(BIN)/python -m pseudoreal_dev gpu-bundle
gpu-report: .venv/tools ## Write docs/benchmarks/gpu.md from RESULTS=pseudoreal-gpu.zip
	@$(BIN)/python -m benchmarks.gpu.report $(RESULTS)

BENCH := .venv-bench/bin
# DS_BUILD_OPS=0: DeepSpeed is installed without compiling; what the benchmark needs of it is compiled afterwards.
.venv-bench/ready: requirements/bench.txt | $(BIN)/uv
	@echo "installing torch and DeepSpeed into .venv-bench (5 GB; one to two minutes), then compiling (four minutes)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-bench
	@export DS_BUILD_OPS=0; $(call UV_INSTALL,--require-hashes -r requirements/bench.txt,$(BENCH)/python)
	@$(call UV_INSTALL,$(PROJECT),$(BENCH)/python)
	@$(BENCH)/python -m benchmarks.compile_deepspeed
	@touch $@

.PHONY: bench-trainer
bench-trainer: .venv-bench/ready ## Time the trainer beside torch's fully_shard and DeepSpeed; writes docs/benchmarks/
	@$(BENCH)/python -m benchmarks.trainer
	@$(BENCH)/python -m benchmarks.depth
	@$(BENCH)/python -m benchmarks.predictions
	@$(BENCH)/python -m benchmarks.report

# BASE: the commit with which the engine is compared.
.PHONY: bench-versions
bench-versions: .venv/all ## Time this engine beside that of another commit, BASE=...; writes docs/data/
	@$(BIN)/python -m benchmarks.versions $(BASE)

.PHONY: bench-checkpoint
bench-checkpoint: .venv-bench/ready ## Time saving and loading beside cp and torch's own; writes docs/benchmarks/
	@$(BENCH)/python -m benchmarks.checkpoints
	@$(BENCH)/python -m benchmarks.report

# The readers of others have requirements of their own, and our package is not there.
.venv-readers/ready: requirements/readers.txt | $(BIN)/uv
	@echo "installing Megatron's and datatrove's readers into .venv-readers (5 GB; one minute)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-readers
	@$(call UV_INSTALL,--require-hashes -r requirements/readers.txt,.venv-readers/bin/python)
	@touch $@

# ONLY: one part of it, which replaces that part of the last results: preparing, reading, resident, losses or training.
.PHONY: bench-data
bench-data: .venv/all .venv-readers/ready ## Time text, token files, vocabularies and a Llama beside others (10 minutes)
	@$(BIN)/python -m benchmarks.data $(ONLY:%=--only %)

# JOBS: the numbers of jobs in flight; 200 take five minutes on two cores, 1000 ten, 5000 about forty. Beside Kubeflow's
# operators, which are built first, they take as long again. WORKERS: pods of one job.
.PHONY: bench-operator
bench-operator: .venv/all ## Measure the operator with many jobs, JOBS="200 1000 5000", and beside Kubeflow's, WORKERS="1000 5000 10000"; writes docs/benchmarks/
	@$(BIN)/python -m benchmarks.operator $(JOBS:%=--jobs %)
	@$(BIN)/python -m benchmarks.operator.beside $(JOBS:%=--jobs %) $(WORKERS:%=--workers %)

# torchtitan has requirements of its own; DeepSpeed compiles what it opens beside its process group.
.venv-moe/ready: requirements/moe.txt | $(BIN)/uv
	@echo "installing torch, DeepSpeed and torchtitan into .venv-moe (5 GB; one to two minutes), then compiling (a minute)"
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-moe
	@export DS_BUILD_OPS=0; $(call UV_INSTALL,--require-hashes -r requirements/moe.txt,.venv-moe/bin/python)
	@$(call UV_INSTALL,$(PROJECT),.venv-moe/bin/python)
	@.venv-moe/bin/python -m benchmarks.compile_deepspeed ShareMemComm
	@touch $@

# ONLY: one part of it, which replaces that part of the last results: losses, beside, growth, routing or grouped.
.PHONY: bench-moe
bench-moe: venv corpus .venv-moe/ready ## Losses of mixtures by routing and by what layers share, and steps beside DeepSpeed's and torchtitan's (half an hour); writes docs/benchmarks/
	@$(BIN)/python -m benchmarks.moe $(ONLY:%=--only %)

# QUICK=1: ten minutes of trials beside the registered results.
.PHONY: bench-method
bench-method: venv ## Train the arms of docs/method-plan.md that are not trained yet (days on two cores); writes docs/method.md
ifdef QUICK
	@$(BIN)/python -m benchmarks.method.quick
else
	@$(BIN)/python -m benchmarks.method train
	@$(BIN)/python -m benchmarks.method report
endif

# UPGRADE= keeps the versions that there are, and adds only what pyproject.toml names anew.
UPGRADE = --upgrade
LOCK = $(BIN)/uv pip compile --quiet $(UPGRADE) --universal --python-version 3.11 --no-annotate --no-header \
  --generate-hashes --no-emit-index-url --no-emit-find-links
COMPILE = $(LOCK) pyproject.toml
PLACES = --extra s3 --extra gs --extra az --extra hf
WITHOUT_TORCH = $$(sed -nE 's/^(torch|triton|(cuda|nvidia)-[a-z0-9-]+)==.*/--no-emit-package \1/p' requirements/all.txt)
.PHONY: lock
lock: $(BIN)/uv ## Refresh the exact versions, with their hashes, in requirements/
	for group in uv build audit site; do $(LOCK) --group $$group -o requirements/$$group.txt || exit 1; done
	$(COMPILE) --extra operator --extra trainer --extra data $(PLACES) --extra ui --extra tensorboard --extra dev --extra peers -o requirements/all.txt
	$(COMPILE) --extra dev --constraint requirements/all.txt -o requirements/dev.txt
	$(COMPILE) --extra trainer --extra plot --extra ui --constraint requirements/all.txt $(WITHOUT_TORCH) -o requirements/run.txt
	$(COMPILE) --extra operator --extra client --extra test --constraint requirements/all.txt -o requirements/test.txt
	echo torch | $(LOCK) --constraint requirements/all.txt - -o requirements/torch.txt
	$(COMPILE) --extra operator --constraint requirements/all.txt -o requirements/operator.txt
	$(COMPILE) --extra client --constraint requirements/all.txt -o requirements/client.txt
	$(COMPILE) --extra trainer --extra data $(PLACES) --extra tensorboard --extra wandb --constraint requirements/all.txt -o requirements/trainer.txt
	$(BIN)/python dev/pseudoreal_dev/images/cpu_lock.py $(BIN)/uv
	$(COMPILE) --extra trainer --extra bench --constraint requirements/all.txt -o requirements/bench.txt
	$(COMPILE) --extra readers --constraint requirements/all.txt -o requirements/readers.txt
	$(COMPILE) --extra trainer --extra moe -o requirements/moe.txt
