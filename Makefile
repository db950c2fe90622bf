# Every target sets up its own virtual environment when that is missing or out of date.
# On a machine with a GPU: make TORCH="torch==2.13.0 --index-url ..." VENV=.venv-gpu demo

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# In a folder of its own, for one test: transformers imports it where it finds it, with warnings.
TORCHAO ?= torchao==0.18.0
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two workers with one thread each: idle OpenMP threads would spin on the other's core.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

LANES := lane-xla lane-ipex lane-torch211 lane-newest
.PHONY: demo test test-triton wide proofs quick sweep check format docs bench clean $(LANES)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/torchao $(TORCHAO)
	touch $(READY)

demo: $(READY)  ## a real transformer: times of eager, inductor and unified O0-O3, and the report
	$(BIN)/python -m benchmarks.demo

test: $(READY) test-triton  ## every test, many with a sample of their cases
	$(BIN)/python -m tests.support.built_kernels
	$(TESTS) -n 2 --dist worksteal -m "not proof and not wide"

wide: $(READY)  ## the cases that `make test` leaves out
	$(BIN)/python -m tests.support.built_kernels
	$(TESTS) -n 2 --dist worksteal -q -m "wide and not proof"

test-triton: $(READY)  ## Triton's kernels in its interpreter, forward and backward, against float64
	TRITON_INTERPRET=1 $(TESTS) -n 2 --dist worksteal -q tests/kernels/triton

proofs: $(READY)  ## every kernel compiled for every GPU architecture; planted bugs turn the suite red
	$(TESTS) -n 2 --dist worksteal -q -m proof tests/cross_compile tests/planted_bugs

quick: $(READY)  ## the tier without compilers and second processes, under 90 seconds
	$(TESTS) -m quick

# A lane is another torch in a virtual environment of its own, .venv-xla and so on; tests/lanes has
# the versions. LANE_OPTIONS: --only-build, --remove (what this run made), --least-disk GB,
# --minutes N (stop then, and say what was not run).
$(LANES): lane-%:  ## torch 2.9 + torch_xla, 2.8 + IPEX, 2.11, newest: builds, then tests, on the CPU
	$(PYTHON) -m tests.lanes $* $(LANE_OPTIONS)

sweep: $(READY)  ## every op of torch's OpInfo database; about an hour on 2 cores
	$(BIN)/python -m tests.sweep

check: $(READY)  ## format, lint, types, import rules, generated documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(READY)  ## put format and generated documentation right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python docs/generate.py

docs: $(READY)  ## the documentation as a site, in site/: strict about links, without network; seconds
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(READY)  ## the core set: JSON, CSV and a page under benchmark-results; a quarter of an hour
	mkdir -p benchmark-results
	$(BIN)/python -m kernel_dispatch bench core --levels O0,O1,O2,O3 --seconds 1 \
	  --json benchmark-results/core.json --csv benchmark-results/core.csv \
	  --html benchmark-results/core.html --plots benchmark-results/plots

clean:
	rm -rf $(VENV) $(LANES:lane-%=.venv-%) build dist *.egg-info benchmark-results torch_compile_debug
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
