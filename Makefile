# make venv   .venv with everything, and .venv/bin/kvstore    (PYTHON=python3.12 make venv)
# make demo   a real daemon and real engines, shown            make test   everything that proves it
# make lint   format, lint, types                              make bench  figures of this machine
# make clean  what was made here, away

VENV := .venv/bin
WORKERS ?= 2

.PHONY: venv venv-033 vllm-source demo test test-fast test-033 lint format bench clean

venv:
	@scripts/venv.sh

# vLLM's own test helpers, which are in its source distribution only.
vllm-source: venv
	@scripts/vllm_source.sh 0.32.0 .cache/vllm-0.32.0 tests requirements

# The newest vLLM without kernels: its connector interface and its scheduler, no model.
venv-033: venv
	@scripts/venv_next.sh

demo: venv
	@$(VENV)/kvstore demo --html demo-report.html

# Tests that start engines want the cores for themselves, so they run after the others, one at a time.
test: venv vllm-source lint
	$(VENV)/python -m pytest -q -n $(WORKERS) -m "not vllm"
	$(VENV)/python -m pytest -q -m vllm
	@$(MAKE) --no-print-directory test-033

# The connector under vLLM's newest scheduler: the tests that need no model.
test-033: venv-033
	.cache/venv-0.33/bin/python -m pytest -q -p no:cacheprovider tests/vllm/test_world.py

test-fast: venv
	$(VENV)/python -m pytest -q -n $(WORKERS) -m "not vllm and not slow"

lint: venv
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy

format: venv
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

bench: venv
	@$(VENV)/python -m benchmarks

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
