# make venv   .venv with everything, and .venv/bin/kvstore    (PYTHON=python3.12 make venv)
# make demo   a real daemon and real engines, shown            make test   everything that proves it
# make lint   format, lint, types                              make bench  figures of this machine
# make demo-regions   three regions and a new cluster: [TRACE=trace.jsonl] [SPEED=5]
# make demo-coldstart a model published, preloaded, killed, resumed, mirrored, and served from everywhere: [SIZE=2GiB]
# make drill  twenty faults under traffic: does everything that people look at name them: [FAULTS="'disk hung' 'port taken'"]
# make docs   the documentation as a site, in site/            make proto, make grpc-docs   kvstore/v1 and docs/grpc.md from proto/
# make dist   wheel and source distribution, in dist/          make first-hour   what a new user does in the first hour, from that wheel
# make trial  answers in time among bursts                     make clean  what was made here, away
# make test-nixl  prefill and decode with NIXL between them and ours beside it (70 MB more)
# make soak   SEEDS=10000 simulated deployments, feeds, and loads and saves over a simulated accelerator; ROUNDS=500 kills; our policy on every traffic;
#             REGION_ROUNDS=50 kills of daemons and mirrors of regions, and of who publishes, preloads, mirrors, collects and loads models,
#             partitions of PARTITION_S=60 seconds;
#             PAIRS=5 rounds of engines that must share what they store or must not; INPUTS=100000 damaged inputs of each format;
#             all of what can be wrong in a command, a setting, the environment

# Daemons and commands are started by the thousand here: without its compiled modules each start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv/bin
WORKERS ?= 2
WAITERS ?= 4
BESIDE ?= 1
SEEDS ?= 10000
ROUNDS ?= 500
REGION_ROUNDS ?= 50
PARTITION_S ?= 60
PAIRS ?= 5
INPUTS ?= 100000
WITHOUT_ENGINES := $(addprefix tests/vllm/,$(addprefix test_,world.py models.py epochs.py live_weights.py queue.py patience.py namespace.py identity.py settings.py) \
	$(addprefix siblings/test_,siblings.py layout.py) theirs/test_theirs.py)

.PHONY: proto grpc-docs docs dist first-hour venv venv-033 vllm-source vllm-source-033 demo demo-regions demo-coldstart drill test fetched collected test-fast test-waiting test-engines test-connector test-033 test-nixl trial lint format bench soak clean

venv:
	@scripts/venv.sh

# vLLM's own tests, which are in its source distributions only.
vllm-source: venv
	@scripts/vllm_source.sh 0.32.0 .cache/vllm-0.32.0 tests requirements

vllm-source-033: venv-033
	@scripts/vllm_source.sh 0.33.0 .cache/vllm-0.33.0 tests

# The newest vLLM without kernels: its connector interface and its scheduler, no model.
venv-033: venv
	@scripts/venv_next.sh

demo: venv
	@$(VENV)/python -m examples.demo --html demo-report.html

demo-regions: venv
	@$(VENV)/python -m benchmarks.regions $(if $(SPEED),--speed $(SPEED)) $(if $(TRACE),--trace "$(TRACE)")

demo-coldstart: venv
	@$(VENV)/python -m examples.coldstart $(if $(SIZE),--size $(SIZE))

drill: venv
	@$(VENV)/python -m benchmarks.drill $(FAULTS)

# Tests without engines wait for timers more than half of their time, so four run at a time on two cores, and those of vLLM's newest
# scheduler beside them. Tests that start engines come after the others, a file on each core; the connector's, which need none, fill
# the time in which engines wait for each other.
test: venv
	@$(MAKE) --no-print-directory -j2 lint fetched collected
	@$(MAKE) --no-print-directory -j2 test-waiting test-033
	@$(MAKE) --no-print-directory -j2 test-engines test-connector

# Test modules are compiled once, and not by each of the workers at the same time.
collected:
	@$(VENV)/python -m pytest -q --collect-only -m "not vllm" >/dev/null || true

# One after the other: each is asked for by those after it, too.
fetched:
	@for what in vllm-source venv-033 vllm-source-033; do $(MAKE) --no-print-directory $$what || exit 1; done

test-waiting:
	$(VENV)/python -m pytest -q -n $(WAITERS) --dist worksteal -m "not vllm"

test-engines:
	$(VENV)/python -m pytest -q -n $(WORKERS) --dist loadfile -m vllm $(addprefix --ignore=,$(WITHOUT_ENGINES))

test-connector:
	$(VENV)/python -m pytest -q -n $(WORKERS) --dist worksteal -m vllm $(WITHOUT_ENGINES)

# The connector under vLLM's newest scheduler: the tests that need no model.
test-033: venv-033 vllm-source-033
	.cache/venv-0.33/bin/python -m pytest -q -n $(BESIDE) --dist worksteal -p no:cacheprovider tests/vllm/test_world.py tests/vllm/siblings/test_layout.py tests/vllm/test_queue.py tests/vllm/test_patience.py tests/vllm/test_identity.py tests/vllm/test_loader.py tests/vllm/theirs/test_theirs.py

test-nixl: venv vllm-source
	$(VENV)/pip install -q --no-deps -r requirements/nixl.lock
	$(VENV)/python -m pytest -q tests/vllm/test_nixl.py

test-fast: venv
	$(VENV)/python -m pytest -q -n $(WORKERS) -m "not vllm and not slow"

# One engine pings while others do their worst, by the clock: only on a quiet machine.
trial: venv
	KVSTORE_TRIAL=1 $(VENV)/python -m pytest -q -s tests/door/test_fairness.py

lint: venv
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy

format: venv
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

# kvstore/v1 from proto/, by the tools that requirements/proto.lock pins.
proto:
	@scripts/proto.sh

# docs/grpc.md from the comments in proto/.
grpc-docs: venv
	@$(VENV)/python -m scripts.grpc_docs

# --strict: a link that leads nowhere ends it.
docs: venv
	@NO_MKDOCS_2_WARNING=1 $(VENV)/python -m mkdocs build --quiet --strict
	@echo "site/index.html; with a search: python3 -m http.server --directory site"

# The same bytes whoever builds it.
dist:
	@[ .cache/venv-dist/ready -nt requirements/build.lock ] || { "$${PYTHON:-python3}" -m venv --clear .cache/venv-dist && \
		.cache/venv-dist/bin/pip install -q --no-deps -r requirements/build.lock && touch .cache/venv-dist/ready; }
	@rm -rf dist
	@.cache/venv-dist/bin/python -m hatchling build -d dist

first-hour: venv dist
	@$(VENV)/python -m benchmarks.first_hour dist/*.whl

bench: venv
	@$(VENV)/python -m benchmarks

soak: venv
	SEEDS=$(SEEDS) ROUNDS=$(ROUNDS) $(VENV)/python -m pytest -q -n $(WORKERS) --timeout=0 tests/replication/test_mirror_simulation.py tests/replication/test_feed_simulation.py tests/replication/hostile tests/replication/test_audit.py tests/coldstart/test_collecting.py tests/replay/test_replay.py tests/engine/test_engine_model.py
	INPUTS=$(INPUTS) $(VENV)/python -m pytest -q -n $(WORKERS) --timeout=0 tests/fuzz
	SEEDS=$(SEEDS) ROUNDS=$(ROUNDS) $(VENV)/python -m pytest -q --timeout=0 tests/device/test_transfers.py tests/kill/test_kill_loop.py tests/rpc/test_door.py tests/rpc/test_kills.py
	KEEPERS=1 ROUNDS=$(REGION_ROUNDS) PARTITION_S=$(PARTITION_S) $(VENV)/python -m pytest -q -s --timeout=0 \
		tests/region/test_keepers.py \
		$(addprefix tests/region/test_,kills.py partition.py mirror_process.py model_mirror_process.py read_through.py verify.py warm.py) \
		$(addprefix tests/coldstart/test_,preload_command.py model_command.py) $(addprefix tests/kill/test_,models.py model_loads.py)
	ATTACKS=1 INPUTS=2000 $(VENV)/python -m pytest -q -s --timeout=0 tests/rpc/test_attacks.py tests/security/test_garbage.py
	PAIRS=$(PAIRS) $(VENV)/python -m pytest -q --timeout=0 $(addprefix tests/vllm/test_,identity_engines.py data_parallel.py compile_caches.py)
	SWEEP=1 $(VENV)/python -m pytest -q --timeout=0 tests/cli/test_sweep.py
	$(VENV)/python -m benchmarks.envelope

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
