# Everything starts here; see `make help`.
PYTHON ?= python3
# Another torch than that of constraints.txt, in an environment of its own: make test TORCH=2.15.0
TORCH ?=
VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Files of `make quick`, tests/**/test_*.py: every concept of the core, and the grid on the eager and the traced engine.
QUICK := architecture seams public grid traced factors merge naive errors_arguments errors_loss explain layers_engine
# The seeds of `make fuzz`, from and up to.
EAGER ?= 0 5000
TRACED ?= 0 2000
COMPILED ?= 0 300
# The run that `make bench-summary` reads.
RUN ?= benchmarks/results/cpu.json
# One process with one thread per core. Files stay together: the tests of one file share compiled programs. Those with
# the most tests start first, and files of one test, notebooks before examples, fill up the end. Processes that tests
# start find the bytecode.
# A process that dies ends the run: pytest-xdist would wait for ever for the rest of its file.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist loadfile --max-worker-restart 0 -p no:benchmark
PEERS := .venv-peers/.installed .venv-jax/.installed .venv-mindspore/.installed

.DEFAULT_GOAL := help
.PHONY: help demo quick test site slow cuda fuzz neighbours lint bench bench-peers bench-report bench-summary docs

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@# Without torchvision, which only examples of BackPACK and kronfluence use: built for CUDA, it fails beside a torch for
	@# CPUs. Without dattri's MIDI files, and the old attrs that dp-accounting pins and does not need.
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --no-deps \
		backpack-for-pytorch curvlinops-for-pytorch dattri dp-accounting kronfluence
	@touch $@

.venv-%/.installed: benchmarks/environments/%.txt constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	@touch $@

demo: $(INSTALLED) ## roll out a policy on CartPole and compare per-sample gradients with the naive loop
	$(BIN)/persample compare --output demo

lint: $(INSTALLED) ## style, docstrings against signatures, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

quick: lint ## lint, then the tests of the core: a minute, while you write
	$(PYTEST) --quiet $(wildcard $(QUICK:%=tests/*/test_%.py) $(QUICK:%=tests/*/*/test_%.py))

test: $(INSTALLED) ## lint and strict docs, side by side, then all tests with warnings as errors, examples, most notebooks
	$(MAKE) --jobs 2 lint site
	$(PYTEST) --nbmake

site: $(INSTALLED) ## build the documentation; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .site

slow: $(INSTALLED) ## trainings, long notebooks, larger grids of programs, torch's operator database, random programs, 2,000 interrupts
	$(PYTEST) --nbmake -m slow

cuda: $(INSTALLED) ## tests of a GPU, with a torch that sees one
	$(PYTEST) -m cuda

fuzz: $(INSTALLED) ## random programs against plain autograd; to go on: make fuzz EAGER='1200 5000' TRACED='0 2000' COMPILED='0 300'
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py eager $(EAGER)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py traced $(TRACED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py compiled $(COMPILED)

neighbours: ## test beside other Pythons and neighbours, each in an environment of its own; write the table of docs/ecosystem.md
	$(PYTHON) tests/neighbours.py

bench: $(INSTALLED) ## time the methods side by side in one process (ratios hold within one run)
	$(BIN)/python -m pytest $(wildcard benchmarks/test_*.py) --benchmark-only --benchmark-group-by=group --benchmark-columns=median,iqr,rounds

bench-peers: $(INSTALLED) $(PEERS) ## measure every method and every peer, each in its own environment (resumes)
	$(BIN)/python -m benchmarks.run

bench-report: $(INSTALLED) ## write the tables and figures of README and the benchmark pages from the committed runs
	$(BIN)/python -m benchmarks.pages

bench-summary: $(INSTALLED) ## summarize one run (RUN=FILE.json), and write its page and figures to bench-report/
	$(BIN)/python -m benchmarks.report $(RUN)

docs: $(INSTALLED) ## build the documentation and serve it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve
