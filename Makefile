# Every target prepares .venv first, once; after that nothing here needs a network.
#
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu test     a small CPU build of torch instead of the default one
#   make DEVICE=cuda demo                                          the demo on a GPU
#   make STORE=s3 demo                                             the demo with its checkpoints in a bucket
#   make PYTHON=python3.12 test                                    another interpreter for .venv (3.10 or newer)

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
STEPS ?= 90
DEVICE ?= cpu
STORE ?= directory
ROOT ?= holdfast-data
BENCH ?=
ONLY ?=
SOURCES ?=
TESTERS ?= 4
PROFILE ?= ci
STOPS = tests/regressions/test_ranks_stop_at_one_step.py tests/regressions/test_ranks_that_saved_other_steps.py tests/regressions/test_torchrun_is_told_to_stop.py
FUZZ_S ?= 300
ATTACK_S ?= 3600
FROZEN_S ?= 150

BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
DOCS := $(VENV)/.docs
RELEASE := $(VENV)/.release

.DEFAULT_GOAL := help
.PHONY: help demo serve test collected crash frozen fuzz attack cluster soak objects e2e browser engine versions lock dist installed integrations corpus official bench docs check types style format clean tools

help: ## what can be made
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(READY) ## kill a training run, resume it, prove that nothing was lost (one to two minutes on two cores)
	$(BIN)/holdfast demo --steps $(STEPS) --device $(DEVICE) --store $(STORE)

serve: $(READY) ## run the daemon on ./holdfast-data
	$(BIN)/python -m holdfast_service --root $(ROOT)

# Files as they are collected, the longest first: by the number of their tests these would come last, and one core would wait.
# Two testers more than a small machine has cores: tests wait for disks, daemons and ranks a good part of their time.
# A test that has not ended after minutes says where each of its threads stands, and ends the run.
HANGS := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true
test: $(READY) tools ## all tests but the long ones; PROFILE=nightly with ten times as many examples
	$(BIN)/python -m pytest --hypothesis-profile $(PROFILE) --cache-clear -n $(TESTERS) --dist loadfile --no-loadscope-reorder $(HANGS) || $(BIN)/python -m tests.again $$?

# Its testers find the tests compiled, which takes each of them half a minute otherwise.
collected: $(READY) ## compile the tests
	-@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider > /dev/null

crash: $(READY) ## kill and fault injection, the long lanes included
	$(BIN)/python -m pytest -m "not e2e" --crash-report build/crash.json tests/crash tests/storage/test_posix_store.py tests/regressions/test_a_catalog_that_is_away.py $(STOPS)

# Some twelve minutes, in which the machine mostly waits.
frozen: $(READY) ## stop daemons (SIGSTOP) at every point for FROZEN_S seconds, and print for how long training stood still
	$(BIN)/python -m pytest -m crash_slow -s --frozen-s $(FROZEN_S) tests/crash/test_frozen_daemons.py

fuzz: $(READY) ## look for inputs that no reader and no route handles, for FUZZ_S seconds each
	$(BIN)/python -m pytest -m "" -s --fuzz-s $(FUZZ_S) tests/fuzz

attack: $(READY) ## every route attacked by everybody who may not, and random deaths for ATTACK_S seconds
	$(BIN)/python -m pytest -m "attack" -s --attack-s $(ATTACK_S) tests/attack

CLUSTER ?=
cluster: $(READY) ## three nodes train on one root and one is lost, torchrun on two, killed in every round: about eight minutes
	$(BIN)/python -m pytest -m "cluster and not cluster_slow" -n 2 --dist loadfile $(CLUSTER) tests/cluster tests/regressions

# An hour and a half on two cores, most of which stopped daemons take: half an hour with CLUSTER="--frozen-s 45". Longer, and with
# more chances: CLUSTER="--cluster-s 600 --cluster-rounds 100 --cluster-away-s 600".
soak: $(READY) ## the same, and killed or stopped at every named point, PostgreSQL away, random deaths; CLUSTER="--cluster-s 600"
	$(BIN)/python -m pytest -m cluster -n 2 --dist loadfile $(CLUSTER) tests/cluster tests/regressions

# Debian's packages of Ceph, 63 MB, are installed by nothing else: elsewhere the tests on radosgw are skipped, and say so.
CEPH := radosgw ceph-mon ceph-osd ceph-common
OBJECTS ?=
objects: $(READY) ## object storage on moto and Ceph's radosgw, and with thousands of faults on every server; OBJECTS="-k races"
	@command -v radosgw >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
		( apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(CEPH) ) || true
	$(BIN)/python -m pytest -m objects -n 2 --dist worksteal $(OBJECTS)

e2e: $(READY) ## the demo and other long runs, as tests
	$(BIN)/python -m pytest -m e2e

browser: $(READY) ## the dashboard in a real Chromium, while a training run saves
	$(BIN)/python -m pytest -m browser tests/wings/console

engine: $(READY) ## run what deploy/ has: images and Compose files with a real engine (root, docker.io, docker-compose, debootstrap), Slurm's script
	$(BIN)/python -m pytest -m engine tests/containers tests/cluster/test_slurm.py

versions: $(READY) ## a daemon and its ranks on Python 3.10, 3.12 and 3.13, and with the oldest packages and torch that pyproject.toml allows
	$(BIN)/python -m pytest -m versions tests/versions

# The newest that pyproject.toml allows, for every Python and machine at once. CONTRIBUTING.md says when.
LOCK := $(BIN)/python -m uv pip compile --quiet --universal --generate-hashes --upgrade --python-version 3.10 --custom-compile-command "make lock"
lock: $(READY) ## the packages that the daemon's image installs, as they are today, into deploy/lock (needs a network)
	$(LOCK) --extra service --extra postgres --extra otel --extra s3 pyproject.toml --output-file deploy/lock/service.txt
	echo hatchling | $(LOCK) - --output-file deploy/lock/build.txt

# The routines in C link to nothing but libc, so that auditwheel only gives the wheel the name under which PyPI takes it.
dist: $(RELEASE) ## what a release publishes: sdist and wheel into dist/, the SBOM of the daemon's image into build/sbom.json
	rm -rf dist && mkdir -p build
	$(BIN)/python -m uv build --build-constraints deploy/lock/build.txt --require-hashes --out-dir dist
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl
	$(BIN)/cyclonedx-py requirements deploy/lock/service.txt --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json

INSTALLED := build/installed/bin
installed: ## the wheel of dist/ in an environment of its own: the commands, and the demo
	$(PYTHON) -m venv --clear build/installed
	$(INSTALLED)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(INSTALLED)/python -m pip install "$$(ls dist/*.whl)[demo]"
	cd build && installed/bin/holdfast doctor && installed/bin/holdfast demo --steps 30

integrations: $(READY) ## the adapters inside their real frameworks, each in an environment of its own; ONLY="peft dcp"
	$(BIN)/python -m tests.integrations $(ONLY)

# Ten minutes on two cores, and as much again in which pip makes the environments, once.
CASES ?=
corpus: $(READY) ## checkpoints that real libraries write: imported, compared bit by bit, exported, loaded; CASES="peft timm"
	$(BIN)/python -m tests.corpus $(CASES)

official: $(READY) ## tests of the frameworks themselves, without Holdfast and with it; ONLY="accelerate" SOURCES=/checkouts
	$(BIN)/python -m tests.integrations.official $(ONLY) $(if $(SOURCES),--sources $(SOURCES))

bench: $(READY) ## Holdfast and its peers, side by side; BENCH="--quick" to try it (docs/benchmarks.md)
	$(BIN)/python -m benchmarks $(BENCH)

docs: $(DOCS) ## build the documentation site into build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tests.site build/site

check: style types ## format, lint, types, who may import whom, and the sizes of everything

types: $(READY) ## the half of check that takes long
	$(BIN)/mypy

style: $(READY) ## the other half: format, lint, who may import whom, and sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.structure

format: $(READY) ## rewrite what `check` would complain about, where a tool can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove caches, builds and the demo's output; .venv and holdfast-data stay
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find benchmarks client formats service tests -name __pycache__ -type d -prune -exec rm -rf {} +

# And Prometheus with promtool, for alerts and dashboard, out of Debian's package: nothing is installed or started. Without them
# those tests are skipped, and say so.
tools: $(READY) $(TOOLS) ## programs that tests start, and Prometheus for the tests of alerts and dashboard
	@command -v promtool >/dev/null || test -x $(BIN)/promtool -a -x $(BIN)/prometheus || ! command -v apt-get >/dev/null || \
		( mkdir -p build/tools && cd build/tools && { [ "$$(id -u)" != 0 ] || apt-get update -qq; } && \
		apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && mv usr/bin/promtool usr/bin/prometheus $(abspath $(BIN))/ ) || \
		echo "Prometheus could not be had: the tests of alerts and dashboard will be skipped"

# Both marks lie in the environment, so it is made before either of them is left there: `make --jobs` runs their rules at once.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone, so that only this line decides which build of it is taken.
$(READY): pyproject.toml hatch_build.py client/holdfast/memory/native_copy.c formats/holdfast_formats/native_transpose.c formats/holdfast_files/objects/native_crc32.c service/holdfast_service/daemon/averaging/native_lerp.c | $(BIN)/python
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

# Programs that tests start. Without them the tests that need them are skipped and say so, so this never fails.
$(TOOLS): tests/tools.sh | $(BIN)/python
	sh tests/tools.sh
	touch $@

$(RELEASE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e '.[release]'
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install -e '.[docs]'
	touch $@
