# `make help` lists the commands of every day, and `make help-all` all of them. A line that begins with ##@ is the
# heading of a group there.
#
# Everything lives in .venv and in the cache folder, .cache/gracepoint; `make clean` removes both. $TESTCLUSTER_CACHE names
# another cache folder, which `make clean` leaves.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PYTEST := $(PY) -m pytest
# Three tests at a time, as they wait for a third of their time, on two cores. The tests on a cluster are in
# CLUSTERS parts, 1 to 3, each on a cluster of its own, one at a time (tests/cluster/conftest.py).
CLUSTERS ?= 2
EVERY   := not cluster and not controllers and not newest and not promtool and not mounts and not installs and not replay
HERE    := $(EVERY) and not variant
WITHOUT := -n 3 --dist worksteal -m '$(HERE)'
FAST    := -n 3 --dist worksteal -m '$(HERE) and not multiprocess and not long'
# A fifth of Hypothesis's examples; `make test` tries all of them.
UNIT    := -n 3 --dist worksteal -m '$(HERE) and not multiprocess and not long and not integration' --hypothesis-profile=quick tests/unit
INTEGRATION := -n 3 --dist worksteal -m '$(HERE) and integration and not long' --hypothesis-profile=quick tests/unit
CONTRACT := $(FAST) tests/contract tests/chart tests/metadata
ON_CLUSTER := -n $(CLUSTERS) --dist loadscope -v tests/cluster -m 'cluster and not controllers and not variant'
# On one cluster, as they are of few files.
VARIANTS_ON_CLUSTER := -n 0 -v tests/cluster -m 'cluster and not controllers and variant'
# What only the cluster from sources has: its own tests, and object stores that are built from Go modules.
NOT_BY_KIND := --ignore=tests/cluster/test_harness.py --ignore=tests/cluster/test_object_stores.py

# Else every process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
EVERY_DAY := env check test test-unit test-cluster demo try docs
.PHONY: env check test test-unit test-cluster demo try docs help help-all lint types imports format wrap workflows \
	test-variants test-fast test-integration test-contract test-laptop test-accelerator test-set-mesh test-alerts test-mounts \
	test-install test-replay replay cuts outliving snapshot-kills evacuations worker-kills hostile-snapshots mutants test-workloads test-newest-jobset test-newest \
	test-matrix restart-budget system parts servers mount-tools cluster-up cluster-down generate requirements \
	conformance manifests dashboard-picture changelog-draft changelog release sbom clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1" "setuptools>=77"
	@# setuptools warns of folders that shadow packages at every editable installation.
	PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[jax,gcs,s3,cli]' --group dev
	@touch $@

##@ Every day

env: $(STAMP) ## Makes the Python environment (.venv).

check: lint types imports ## Lint, types and the import rules.

test: check ## All of it: checks, unit, contract, multi-process and chart tests, then the cluster's (root, Go; 25 to 35 minutes on two cores).
	@$(MAKE) --no-print-directory servers || { [ "$$CI" != true ] && echo "What needs an object store is skipped below, with the reason."; }
	@$(MAKE) --no-print-directory parts || { [ "$$CI" != true ] && echo "What needs the cluster is skipped below, with the reason."; }
	$(PYTEST) $(WITHOUT)
	$(PYTEST) $(ON_CLUSTER)

test-unit: $(STAMP) ## The unit tests alone, with a fifth of Hypothesis's examples: about a minute on two cores.
	$(PYTEST) $(UNIT)

test-cluster: $(STAMP) ## The cluster tests, and nine faults of the replay (CLUSTER=kind: on clusters of kind, without what needs our own machines).
ifeq ($(CLUSTER),kind)
	$(PY) -m tests.testcluster pick kind
	TESTCLUSTER_PROVIDER=kind $(PYTEST) $(ON_CLUSTER) $(NOT_BY_KIND)
else
	@$(MAKE) --no-print-directory parts
	$(PYTEST) $(ON_CLUSTER)
	$(PYTEST) -n 0 -v -s -m replay tests/replay
endif

demo: $(STAMP) ## A cluster trains, loses a node and goes on from the very step, then one without notice (CLUSTER=kind or local; STORAGE=gs or s3: an object store).
	$(PY) -m demo --provider=$(or $(CLUSTER),$(if $(STORAGE),local,auto)) $(if $(STORAGE),--storage=$(STORAGE))

try: $(STAMP) ## A cluster that stays, with a protected job in it, and the commands to try with it (CLUSTER=kind or local).
	$(PY) -m demo.tryout --provider=$(or $(CLUSTER),auto)

docs: $(STAMP) ## Builds the documentation's site in build/site, which works from a disk; links are checked.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

##@ This list

help: ## Shows the commands of every day.
	@awk -F ':.*## ' -v shown=" $(EVERY_DAY) " \
		'/^[a-z-]+:.*## / && index(shown, " " $$1 " ") {printf "%-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "\`make help-all\` lists the rest: more tests, generated files, the release."

help-all: ## Shows all commands, by what they are for.
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Parts of `make check`, and the format

lint: $(STAMP) ## Ruff: rules and format.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## mypy, for Linux and for macOS.
	$(PY) -m mypy
	$(PY) -m mypy --platform darwin sidecar/gracepoint operator/gracepoint_cli # what Linux alone has is guarded

imports: $(STAMP) ## The import rules.
	$(VENV)/bin/lint-imports

format: $(STAMP) ## Formats the code.
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# Pages that people write. Tables in them that are generated are generated again.
WRAPPED := $(wildcard *.md docs/*.md docs/decisions/*.md examples/*/*.md charts/gracepoint/*.md changelog.d/README.md release/README.md)
wrap: $(STAMP) ## Wraps the lines of pages at 120 characters (PAGES="docs/mine.md").
	$(PY) -m mdformat $(or $(PAGES),$(WRAPPED))
	@$(MAKE) --no-print-directory generate

# Another version of it: ACTIONLINT=v1.7.13.
ACTIONLINT ?= v1.7.12
workflows: ## Checks the hosted workflows with actionlint (needs Go).
	go run github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT)

##@ Parts of `make test`

test-fast: check ## Checks and the tests that need neither the cluster nor several JAX processes: two to three minutes.
	$(PYTEST) $(FAST)

test-integration: $(STAMP) ## The tests beside them that start processes or servers, compile programs, save whole states, or wait for seconds.
	$(PYTEST) $(INTEGRATION)

test-contract: $(STAMP) ## Wire and format contracts, and the chart if helm is there.
	$(PYTEST) $(CONTRACT)

LAPTOP := tests/unit/test_macos.py tests/unit/checkpoint/test_saving_and_restoring.py tests/unit/session/test_session.py tests/unit/session/test_starting.py
test-laptop: $(STAMP) ## Sessions, saves and restores, with what macOS has: as the hosted workflow runs on macOS.
	$(PYTEST) $(LAPTOP)

##@ More tests than `make test` has

# Without an environment of its own: on a bare machine with a GPU, where nothing can be installed.
test-accelerator: ## What needs a device of its own: tests on a GPU, figures with goals; at most 8 minutes (FLAGS="--directory DIR").
	$(or $(wildcard $(PY)),python3) -m benchmarks.accelerator $(FLAGS)

# Other stores, kinds of workload and of loss, sizes: `make test` has the most telling of each.
test-variants: servers ## What `make test` tries once, in its other variants (CLUSTER=kind, as test-cluster; root, Go; half an hour).
ifeq ($(CLUSTER),kind)
	$(PY) -m tests.testcluster pick kind
	$(PYTEST) -n 3 --dist worksteal -m '$(EVERY) and variant'
	TESTCLUSTER_PROVIDER=kind $(PYTEST) $(VARIANTS_ON_CLUSTER) $(NOT_BY_KIND)
else
	@$(MAKE) --no-print-directory parts
	$(PYTEST) -n 3 --dist worksteal -m '$(EVERY) and variant'
	$(PYTEST) $(VARIANTS_ON_CLUSTER)
endif

# Auto and explicit axes, on one device and on eight.
test-set-mesh: $(STAMP) ## Orbax's contract tests under jax.set_mesh, with values that leave the CPU as they leave accelerators (ten minutes).
	set -e; for mesh in auto explicit; do for devices in 1 8; do echo "== $$mesh axes, devices: $$devices"; \
		CONTRACT_MESH=$$mesh CONTRACT_DEVICES=$$devices $(PYTEST) -n 3 --dist worksteal --timeout 600 -q tests/contract/test_orbax_*.py; done; done

test-alerts: $(STAMP) ## The alerts and the dashboard's queries, judged by Prometheus (builds it first; needs Go).
	$(PY) -m tests.testcluster build --parts prometheus
	$(PYTEST) -p no:xdist -m promtool tests/chart tests/dashboard tests/replay

test-mounts: servers mount-tools ## ext4, XFS, Btrfs, power losses, mounted buckets (builds gcsfuse first: some minutes; root).
	$(PY) -m tests.testcluster build --parts gcsfuse
	$(PYTEST) -n 0 -v -m mounts tests/unit

test-install: $(STAMP) ## Installs the built wheel into new environments and uses it: each extra brings its own and nothing else (needs an index).
	$(PYTEST) -n 0 -v -m installs tests/unit/test_installed.py

test-replay: parts ## Nine kinds of faults, one after another, on a JobSet and a Job (10 to 14 minutes; root, Go).
	$(PYTEST) -n 0 -v -s -m replay tests/replay

replay: parts ## 300 faults of all kinds (hours; root, Go; REPLAY="--minutes 140" makes parts, the same command goes on).
	$(PY) -m tests.replay $(REPLAY)

cuts: $(STAMP) servers ## Cuts saves in object stores after every single request (half an hour; Go).
	CUT_EVERY=1 RACES=500 $(PY) -m pytest -p no:xdist --timeout 3600 -q tests/unit/checkpoint/steps/test_cuts.py

outliving: $(STAMP) ## Kills trainers and workers at every named point of a handed-over save: 1, 2 and 4 processes (a quarter of an hour).
	OUTLIVING=everything OUTLIVING_PATIENCE_S=20 $(PYTEST) -n 2 --dist worksteal tests/multiprocess/test_outliving.py

snapshot-kills: $(STAMP) ## Kills gangs that send snapshots, at random instants: 500 times, and 50 times with a node's server (hours).
	SNAPSHOT_KILLS=500 SNAPSHOT_SERVER_KILLS=50 SNAPSHOT_KILLS_MIB=64 $(PYTEST) -n 0 -s tests/multiprocess/test_snapshot_kills.py

worker-kills: $(STAMP) ## Kills trainers 200 times while worker processes write their saves: nothing may be lost, torn or left.
	$(PY) -m benchmarks.worker_kills

evacuations: $(STAMP) ## Evacuates 300 MiB of each process before a SIGKILL after 8 s, on storage of 10 MB/s: 100 times (hours).
	EVACUATIONS=100 EVACUATION_MIB=300 EVACUATION_NOTICE_S=8 $(PYTEST) -n 0 -s -o tmp_path_retention_policy=failed \
		tests/multiprocess/test_memory_snapshots.py -k too_slow

hostile-snapshots: $(STAMP) ## Attacks a snapshot server with 10,000 connections of each kind (minutes); make test does so with 500.
	SNAPSHOTS=hostile $(PYTEST) -n 2 --dist worksteal -v tests/unit/snapshots/test_nobody_gets_in.py

mutants: $(STAMP) ## Measures what the tests of the decisive modules notice (half an hour or more; MUTANTS="--all MODULE").
	$(PY) -m tests.mutants $(MUTANTS)

##@ With other projects and other versions

test-workloads: parts ## What needs other projects' controllers: the Kubeflow Trainer, Kueue, Karpenter, the newest JobSet (builds them first; root, Go).
	$(PY) -m tests.testcluster build --parts trainer kueue karpenter
	$(PYTEST) -n 0 -v -m controllers tests/api_server tests/cluster
	@$(MAKE) --no-print-directory test-newest-jobset

# KUBERNETES=1.37: with that one, on which JobSet's agent can also be a sidecar.
KUBERNETES    ?= $(TESTCLUSTER_KUBERNETES)
NEWEST_JOBSET := TESTCLUSTER_JOBSET=0.12 TESTCLUSTER_KUBERNETES=$(KUBERNETES)

test-newest-jobset: system ## What only the newest JobSet has: restarts in place, another size (builds it first; needs Go, root; KUBERNETES=1.37: on that one).
	$(NEWEST_JOBSET) $(PY) -m tests.testcluster build
	$(PY) -m tests.testcluster build --parts jobset-0.12
	$(NEWEST_JOBSET) $(PYTEST) -n 0 -v -m controllers tests/cluster/test_in_place.py tests/cluster/test_resizing.py

test-newest: servers ## What only the newest Kubernetes has, on its API server, scheduler and controllers (builds them first: ten minutes; needs Go).
	$(PY) -m tests.testcluster build --parts etcd kubernetes kubernetes-1.37
	$(PYTEST) -n 0 -v -m newest tests/api_server

test-matrix: system ## The core tests on other versions of Kubernetes and JobSet (builds them first: an hour; root; ROWS="oldest-api ...").
	$(PY) -m tests.testcluster.matrix $(ROWS)

restart-budget: parts ## Counts what uses up a job's restarts: 76 failures of the infrastructure, 28 errors of programs (minutes; needs Go).
	$(PY) -m tests.restart_budget $(FLAGS)

##@ What tests need

system: $(STAMP) ## Installs the system packages that the test cluster needs (root on Debian or Ubuntu; else names them).
	$(PY) -m tests.testcluster install

parts: system ## Builds the test cluster's parts that are not in the cache yet.
	$(PY) -m tests.testcluster build

servers: $(STAMP) ## Builds the object stores of the tests (fake-gcs-server, versitygw); needs Go, no root.
	$(PY) -m tests.testcluster build --parts fake-gcs-server versitygw

mount-tools: $(STAMP) ## Installs the programs that make and mount the file systems of test-mounts (as root).
	$(PY) -m tests.testcluster install --tools

cluster-up: parts ## Brings the local test cluster up and leaves it running.
	$(PY) -m tests.testcluster up

cluster-down: $(STAMP) ## Takes it down.
	$(PY) -m tests.testcluster down

##@ Generated files

generate: $(STAMP) ## Writes what is generated: CRDs, docs/policy.md and docs/signals.md, the chart's table, the version in chart and library.
	$(PY) -m gracepoint_operator.resources --write .
	$(PY) -m gracepoint_operator.signals --write docs/signals.md
	$(PY) -m tests.chart values
	$(PY) -m release version

conformance: $(STAMP) ## Writes tables of what Orbax, JAX and Megatron do, with the tests of each row, to build/conformance.
	$(PY) -m tests.contract.conformance

requirements: $(STAMP) ## Writes operator/requirements.txt: what the operator's image contains, with hashes, from constraints.txt (needs an index).
	$(PY) -m piptools compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-annotate --no-header --no-emit-index-url \
		--no-emit-trusted-host --no-emit-find-links --extra operator -c constraints.txt -o operator/requirements.txt \
		pyproject.toml operator/build-requirements.in

manifests: $(STAMP) ## Writes build/manifests/gracepoint.yaml for kubectl apply, as helm template makes it (needs helm; HELM_FLAGS="--values mine.yaml").
	$(PY) -m tests.chart manifests $(HELM_FLAGS)

dashboard-picture: $(STAMP) ## build/dashboard.png: the dashboard with six recorded hours (needs Go, npm, Chromium).
	$(PY) -m tests.testcluster build --parts prometheus
	$(PY) -m tests.dashboard

##@ A release

changelog: $(STAMP) ## Folds the fragments of changelog.d/ into the changelog's section of pyproject's version, and deletes them.
	$(VENV)/bin/towncrier build --yes

changelog-draft: $(STAMP) ## Shows that section, and changes nothing.
	$(VENV)/bin/towncrier build --draft

release: $(STAMP) ## Builds what is published into build/release, and says how (needs helm; REGISTRY=... DIGEST=sha256:... TAG=v1.2.3 URI=https://.../).
	$(PY) -m release $(if $(REGISTRY),--registry=$(REGISTRY)) $(if $(DIGEST),--digest=$(DIGEST)) $(if $(TAG),'--tag=$(subst ','\'',$(TAG))') $(if $(URI),'--uri=$(subst ','\'',$(URI))')

sbom: $(STAMP) ## Writes build/operator-sbom.json: a CycloneDX list of what the operator's image contains beside its base.
	$(PY) -m release sbom

##@ Cleaning

clean: ## Removes the environment, the cache and all build output.
	rm -rf $(VENV) .cache build *.egg-info sidecar/*.egg-info .mypy_cache .ruff_cache .pytest_cache
