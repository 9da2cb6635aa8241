# make demo   a story, streamed by the embedded model (creates .venv and installs on the first run)
# make test   the fast tests, in two processes: a few minutes (creates .venv and installs what is missing)
# make test-all  the slow tests too, with more examples: what continuous integration runs
# make test-exhaustive  all tests with all examples: an hour; run it weekly, and after changes of the sampling backends
# make lint   ruff, mypy             make docs    docs/stages.md from the stages; checks links
# make bench  the benchmarks, in a minute    make setup   only create .venv with everything for development
# make bench-page  docs/benchmarks.md, measured: a quarter of an hour on an idle machine, with all of '.[torch,bench]'
# make test-clients  the server with litellm, langchain, llm, lm-eval, schemathesis (litellm without its dependencies: they contradict ours)
# make bench-server  the server under load, and what stalls a stream: ten minutes   make bench-engine  the engine beside Transformers: ten minutes
# make bench-gpu  the kernels on a GPU, checked and timed: ten minutes; where there is none it says so
# make bench-structured  what answers of a form cost: masks, compiling, drawing; five minutes

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt
SIDE_BY_SIDE := -n 2 --dist worksteal

.PHONY: setup demo test test-all test-exhaustive test-clients lint docs docs-check bench bench-page bench-engine bench-server bench-structured bench-gpu clean

.venv/python: 
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nucleate needs Python 3.11 or newer; try: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/demo: .venv/python $(SOURCES)
	@echo "installing nucleate into .venv ..."
	@$(PIP) -e .
	@touch $@

.venv/dev: .venv/python $(SOURCES)
	@echo "installing nucleate with its tests' packages (torch, transformers, starlette) into .venv ..."
	@$(PIP) -e '.[dev,torch,server,structured]'
	@touch $@ .venv/demo

setup: .venv/dev

demo: .venv/demo
	@$(BIN)/nucleate generate --echo --repetition-penalty 1.1 "Once upon a time"

test: .venv/dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-all: .venv/dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not exhaustive"

test-exhaustive: .venv/dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m ""

test-clients: .venv/dev
	@$(PIP) -e '.[dev,torch,server,clients]'
	@$(PIP) --no-deps litellm==1.109.1
	$(BIN)/python -m pytest -m slow tests/server/test_clients.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev
	$(BIN)/python docs/build.py

docs-check: .venv/dev
	$(BIN)/python docs/build.py --check

bench: .venv/dev
	$(BIN)/python benchmarks/reference.py
	$(BIN)/python benchmarks/history.py
	$(BIN)/python benchmarks/sampler.py --quick

bench-page: .venv/dev
	$(PIP) -e '.[dev,torch,server,bench]'
	$(BIN)/python benchmarks/sampler.py --json benchmarks/results/sampler.json --docs docs

bench-engine: .venv/dev
	$(BIN)/python benchmarks/engine.py --json benchmarks/results/engine.json

bench-server: .venv/dev
	$(BIN)/python benchmarks/server.py --json benchmarks/results/server.json
	$(BIN)/python benchmarks/stalls.py --json benchmarks/results/stalls.json

bench-structured: .venv/dev
	$(BIN)/python benchmarks/structured.py --json benchmarks/results/structured.json

bench-gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py --csv benchmarks/results/gpu.csv
	@$(PIP) 'matplotlib>=3.8'
	$(BIN)/python benchmarks/gpu_plot.py benchmarks/results/gpu.csv benchmarks/results/gpu.svg

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache
