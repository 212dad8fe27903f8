# `make verify` and `make test` do all set-up on a fresh machine; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
LAB_READY := $(VENV)/.lab-ready
WORKBOOK := tutorials/workbook
LAB_OPTIONS ?=

.PHONY: verify test test-gpu conformance-gpu lint types format bench kernels-report notebooks lab docs mutation clean

verify: $(READY)
	$(BIN)/kimi-linear verify

# Kernels run in Triton's interpreter, which has to be chosen before anything imports triton.
test: lint types
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS)

# On a machine whose own Python has torch, triton, pytest and this package; nothing is set up. What compiles for
# other GPUs needs none and is not run here. OPTIONS="-n 10 --dist loadgroup" takes 90 s on 16 cores.
OPTIONS ?=
test-gpu: SHELL := /bin/bash
test-gpu:
	set -o pipefail; $(PYTHON) -m pytest -p no:benchmark tests/triton tests/gpu \
		--ignore tests/triton/test_compile.py $(OPTIONS) 2>&1 | tee test-gpu.log

# The GPU's columns of docs/conformance-matrix.md, with such a Python too, and with fla in it for fla's columns.
# Compiling takes most of the time: WORKERS as many as there are cores. What MINUTES do not suffice for is not run.
MINUTES ?= 240
RECORDS ?= benchmarks/results/conformance
conformance-gpu:
	$(PYTHON) benchmarks/conformance_runs.py cuda --workers $(WORKERS) --minutes $(MINUTES) --out $(RECORDS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The type checker reads folders, not `package-dir`: show it the tree under the names that users import.
types: $(READY)
	rm -rf $(VENV)/types && mkdir -p $(VENV)/types/kimi_linear
	for folder in reference triton_kernels conformance cli; do \
		ln -s ../../../$$folder $(VENV)/types/kimi_linear/$$folder; done
	MYPYPATH=$(VENV)/types $(BIN)/mypy --cache-dir $(VENV)/.mypy_cache -p kimi_linear

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/model_cpu.py

# Strict: a warning, a dead link or a dead anchor fails the build. Read it at build/site/index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

kernels-report: $(READY)
	$(BIN)/python benchmarks/kernels_report.py

# Runs all tutorials; the notebooks with their outputs land in build/notebooks.
notebooks: $(READY)
	$(BIN)/python tutorials/notebooks.py run build/notebooks

# Opens copies to work in; they are never overwritten.
lab: $(LAB_READY)
	$(BIN)/python tutorials/notebooks.py copy $(WORKBOOK)
	$(BIN)/jupyter-lab --notebook-dir $(WORKBOOK) $(LAB_OPTIONS) $(WORKBOOK)/01_from_softmax_to_a_state.ipynb

$(LAB_READY): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[lab]"
	touch $(LAB_READY)

# Plants small changes in the code that decides verdicts; nine of ten in each module have to fail a test. Ten minutes;
# MUTATION="--only verdict" tries one module, MUTATION=--resume goes on with a run that was interrupted.
mutation: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[mutation]"
	$(BIN)/python tests/mutation.py build/mutation --workers $(WORKERS) $(MUTATION)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,docs]"
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info
