# Every verb of the project; CI calls only these. VENV=... uses another environment than .venv.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
TRL_VENV ?= .bench/trl
PEERS_VENV ?= .bench/peers
SB3_VENV ?= .bench/sb3
FRESH ?= ../shared/tools/fresh.sh
GSM8K ?= data/gsm8k
NO_SECRETS := PENSTOCK_API_KEYS=x $(foreach role,COORDINATOR ROLLOUT ENV REWARD TRAINER SUPERVISOR OPERATOR,PENSTOCK_NATS_$(role)=x)
CLIENTS ?= $(sort $(basename $(notdir $(wildcard tests/clients/requirements/*.txt))))

.DEFAULT_GOAL := help
.PHONY: help setup lock lint format type imports check test test-long sglang-test mutants docstrings chaos fuzz e2e clients clients-venvs docs docs-serve screenshots reference compose-config compose-test compose-robot-test compose-vllm-test sims-test up down \
	demo newcomer bench bench-bus bench-update-path bench-ledger bench-takeover bench-joining bench-embodied bench-robots bench-jobs bench-page bench-weights bench-weight-transports bench-vs-trl bench-trainer bench-gsm8k bench-gsm8k-tool bench-algorithms bench-ingest bench-attacks bench-steps bench-serving bench-engine bench-engine-curves bench-long-prompts bench-shared-prompts bench-online bench-sac bench-length bench-rambling bench-continue fresh package release clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup:  ## environment with everything the other verbs need
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev,docs,bench-plots]'

$(BIN)/pytest:
	$(MAKE) setup

$(BIN)/mkdocs: | $(BIN)/pytest  # the tests do without it
	$(BIN)/pip install -q -e '.[docs]'

$(BIN)/fonttools: | $(BIN)/pytest  # comes with matplotlib; the tests do without it
	$(BIN)/pip install -q -e '.[bench-plots]'

lock:  ## pin what continuous integration and the images install, with hashes; torch is left out: its hashes differ by index
	$(PYTHON) -m venv .bench/uv && .bench/uv/bin/pip install -q uv
	$(PYTHON) deploy/requirements.py --write .bench/uv/bin/uv

lint: $(BIN)/pytest  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(BIN)/pytest  ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(BIN)/pytest  ## mypy --strict
	$(BIN)/mypy

imports: $(BIN)/pytest  ## the architecture, as import contracts
	$(BIN)/lint-imports

check: lint type imports  ## lint, types, architecture and the quick tests: what to run before each commit
	$(BIN)/pytest -q -m "not slow and not long and not e2e" tests/unit tests/property tests/golden tests/contract tests/repo

test: $(BIN)/pytest  ## all tests but the long ones
	$(BIN)/pytest

mutants: $(BIN)/pytest  ## change one rule of the core at a time: do the tests notice? (ARGS="--only gate.py")
	$(BIN)/python tests/mutants.py $(ARGS)

docstrings:  ## draw 100 docstrings for a reader who has not seen the code (ARGS="--seed 1")
	python3 tests/docstrings.py $(ARGS)

chaos: $(BIN)/pytest  ## four jobs under a random schedule of faults (SEED=1 MINUTES=15 ARGS="--kinds kill,stop")
	$(BIN)/python -m tests.chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),15) $(ARGS)

fuzz: $(BIN)/pytest  ## more generated requests to the API, and more orders of events at the coordinator, than in the long tests
	PENSTOCK_FUZZ=full $(BIN)/pytest -m long tests/e2e/openapi tests/property/test_coordinator_machine.py

test-long: $(BIN)/pytest  ## the long ones
	$(BIN)/pytest -m long

sglang-test: export PENSTOCK_ENGINES_DIR ?= $(HOME)/.cache/penstock/engines
sglang-test: $(BIN)/pytest  ## SGLang's own server on a CPU, with fake kernels, against the contract of engines (installs gigabytes)
	$(BIN)/penstock engines install vllm
	$(BIN)/python tests/contract/engines/sglang_cpu/make.py
	PENSTOCK_REQUIRE_ENGINES=sglang-cpu $(BIN)/pytest -n0 -m sglang tests/contract/engines/test_engine_sglang.py

e2e: $(BIN)/pytest  ## only the tests that start the whole stack as processes
	$(BIN)/pytest -m e2e

clients-venvs: $(BIN)/pytest  ## an environment for each client of others (CLIENTS="openai litellm": only those)
	$(BIN)/python tests/clients/venvs.py $(CLIENTS)

clients: clients-venvs  ## clients of others, unmodified, against a running deployment (CLIENTS=... as above)
	PENSTOCK_REQUIRE_CLIENTS="$(CLIENTS)" $(BIN)/pytest -m clients tests/clients tests/e2e/test_fine_tuning.py tests/e2e/test_verifiers.py

docs: $(BIN)/mkdocs  ## the manual, as a site; warnings are errors
	$(BIN)/python docs/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screenshots: $(BIN)/pytest  ## pictures of the web page in docs/dashboard/, taken anew (needs Chromium)
	$(BIN)/python docs/screenshots.py

docs-serve: $(BIN)/mkdocs  ## the manual, live
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

reference: $(BIN)/pytest  ## rewrite the tables in docs/ that come from the code
	$(BIN)/python docs/reference.py

compose-config:  ## the compose files parse: as they are, with GPUs, with vLLM
	env $(NO_SECRETS) docker compose config --quiet
	env $(NO_SECRETS) docker compose -f docker-compose.yml -f deploy/gpu.yml config --quiet
	env $(NO_SECRETS) docker compose -f docker-compose.yml -f deploy/vllm.yml config --quiet

compose-test: compose-config  ## build, start, train, kill the trainer, finish, audit: all in containers
	tests/e2e/compose.sh

compose-robot-test: compose-config  ## build the image with MetaWorld, train an arm to its goal, kill the env worker: all in containers
	tests/e2e/compose_robot.sh

compose-vllm-test: compose-config  ## build the image with vLLM (gigabytes), train, audit, chat: all in containers
	tests/e2e/compose_vllm.sh

sims-test: $(BIN)/pytest  ## the simulator contract with ManiSkill and LIBERO, in environments of their own (installs them: gigabytes)
	for name in maniskill libero; do $(BIN)/penstock sims install $$name || exit; done
	PENSTOCK_REQUIRE_SIMULATORS="maniskill libero" $(BIN)/pytest -n0 -m "" -k "maniskill or libero" \
		tests/contract/test_simulators.py tests/contract/test_simulator_snapshots.py \
		tests/contract/test_simulator_pictures.py tests/contract/test_batched_simulators.py

up:  ## the whole system in containers
	sh deploy/secrets.sh
	docker compose up --build --detach --wait

down:  ## stop it; the volumes stay
	docker compose down

demo: $(BIN)/pytest  ## one job on this machine, start to end
	$(BIN)/penstock demo

bench: bench-bus bench-weights  ## the benchmarks that need nothing but this machine

$(PEERS_VENV)/bin/ray:
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install -q numpy pyzmq ray

newcomer:  ## from an empty environment to an agent that learnt from its users, in transformers; the seconds of each step
	$(PYTHON) benchmarks/newcomer.py --out docs/results/newcomer.json $(ARGS)

bench-bus: $(BIN)/pytest $(PEERS_VENV)/bin/ray  ## the bus beside raw TCP, ZeroMQ and Ray (in an environment of their own)
	$(BIN)/python benchmarks/bus.py --peers $(PEERS_VENV)/bin/python $(ARGS)

bench-update-path: $(BIN)/pytest  ## what a strictly on-policy update waits for the bus
	$(BIN)/python benchmarks/update_path.py $(ARGS)

bench-ledger: $(BIN)/pytest  ## how long a new leader takes to know the state of a long job
	$(BIN)/python benchmarks/ledger.py $(ARGS)

bench-jobs: $(BIN)/pytest  ## pages and submissions per second with ten thousand jobs
	$(BIN)/python benchmarks/jobs.py $(ARGS)

bench-page: $(BIN)/pytest  ## first paint of the web page, and when it shows 200 jobs or the curves of one (needs Chromium)
	$(BIN)/python benchmarks/page.py $(ARGS)

bench-embodied: $(BIN)/fonttools  ## a robot arm as a job beside one plain process, three seeds (needs metaworld)
	$(BIN)/python benchmarks/embodied_training.py $(ARGS)

bench-robots: $(BIN)/pytest  ## robot jobs of examples, each with its goal (installs ManiSkill and LIBERO; ARGS="--jobs pushcube,worldmodel --seeds 1,2,3")
	for name in maniskill libero; do $(BIN)/penstock sims install $$name || exit; done
	$(BIN)/python benchmarks/robots.py $(ARGS)

$(SB3_VENV)/bin/.stable-baselines3:
	$(PYTHON) -m venv $(SB3_VENV)
	$(SB3_VENV)/bin/pip install -q torch==2.13.0  # first and pinned: the same one on both sides
	$(SB3_VENV)/bin/pip install -q stable-baselines3==2.9.2 "gymnasium[mujoco]==1.4.0" mujoco==3.3.0
	touch $@

bench-sac: $(BIN)/fonttools $(SB3_VENV)/bin/.stable-baselines3  ## SAC as a job beside Stable-Baselines3, two MuJoCo tasks, three seeds (installs it into an environment of its own)
	$(BIN)/python benchmarks/soft_actor_critic.py --baseline $(SB3_VENV)/bin/python --out docs/results/soft_actor_critic $(ARGS)

bench-takeover: $(BIN)/pytest  ## how long a job stands still when its leader is replaced, with much kept or waiting
	$(BIN)/python benchmarks/takeover.py $(ARGS)

bench-joining: $(BIN)/pytest  ## how soon a rollout worker that joins contributes, and what is lost when one leaves or is killed
	$(BIN)/python benchmarks/joining.py --out docs/results/joining.json $(ARGS)

bench-weights: $(BIN)/pytest  ## publish, stage, commit: time and pause
	$(BIN)/python benchmarks/weights.py $(ARGS)

bench-weight-transports: $(BIN)/pytest  ## every transport of weights beside a memory copy and a raw socket, 100 MB to 2 GB
	$(BIN)/python benchmarks/weight_transports.py --out docs/results/weight_transports.json $(ARGS)

$(TRL_VENV)/bin/trl:
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip install -q torch==2.13.0  # first and pinned: the same one on both sides
	$(TRL_VENV)/bin/pip install -q trl==1.16.0

bench-vs-trl: $(BIN)/pytest $(TRL_VENV)/bin/trl  ## the same task, model and seed with TRL (installs TRL into an environment of its own)
	$(BIN)/python benchmarks/vs_trl.py --trl-python $(TRL_VENV)/bin/python $(ARGS)

bench-trainer: $(BIN)/pytest $(TRL_VENV)/bin/trl  ## tokens/s of the training step beside TRL's and beside a bare PyTorch loop
	$(BIN)/python benchmarks/trainer.py --trl-python $(TRL_VENV)/bin/python $(ARGS)

bench-gsm8k: $(BIN)/fonttools  ## RL beside more supervised training on GSM8K's calculator expressions (GSM8K=directory of its files)
	$(BIN)/python benchmarks/gsm8k_calc.py --train $(GSM8K)/train.jsonl --test $(GSM8K)/test.jsonl --out docs/results/gsm8k_calc $(ARGS)

bench-gsm8k-tool: $(BIN)/pytest  ## does a policy learn to call its calculator on GSM8K's annotations, three seeds (GSM8K=as above)
	$(BIN)/python benchmarks/gsm8k_tool.py --train $(GSM8K)/train.jsonl --test $(GSM8K)/test.jsonl --out docs/results/gsm8k_tool.json $(ARGS)

bench-algorithms: $(BIN)/fonttools  ## learning curves of every algorithm in examples/algorithms, three seeds each
	$(BIN)/python benchmarks/algorithms.py --out docs/results/algorithms $(ARGS)

bench-length: $(BIN)/fonttools  ## which aggregations and overlong rules make wrong answers longer, three seeds each
	$(BIN)/python benchmarks/length_bias.py --out docs/results/length_bias $(ARGS)

bench-rambling: $(BIN)/fonttools  ## which overlong rules lose right answers, three seeds each
	$(BIN)/python benchmarks/length_bias.py --task rambling --out docs/results/rambling $(ARGS)

bench-continue: $(BIN)/pytest  ## does a policy lose what it learnt when its training goes on: a new job with and without warm-up, extend
	$(BIN)/python benchmarks/continued.py --out docs/results/continued.json $(ARGS)

bench-attacks: $(BIN)/pytest  ## how far a stranger or a tenant can slow the coordinator over HTTP: loop lag, lease, another tenant's latency
	$(BIN)/python benchmarks/attacks.py $(ARGS)

bench-ingest: $(BIN)/pytest  ## durable feedback per second through HTTP, and what SIGKILL loses
	$(BIN)/python benchmarks/ingest.py $(ARGS)

bench-steps: $(BIN)/pytest  ## environment steps per second through one rollout worker, beside a bare simulator loop
	$(BIN)/python benchmarks/embodied.py steps $(ARGS)

bench-serving: $(BIN)/pytest  ## tokens/s and time to the first token through the gateway, beside the bare engine
	$(BIN)/python benchmarks/serving.py $(ARGS)

bench-long-prompts: $(BIN)/pytest  ## how long prompts that arrive hold up a completion that runs
	$(BIN)/python benchmarks/long_prompts.py $(ARGS)

bench-shared-prompts: $(BIN)/pytest  ## tokens/s and cache memory of groups that share their prompt's keys and values, beside a copy in each row
	$(BIN)/python benchmarks/shared_prompts.py $(ARGS)

bench-engine: $(BIN)/pytest  ## tokens/s of the embedded engine beside transformers' generate and vLLM (which `penstock engines install vllm` makes)
	$(BIN)/python benchmarks/engine.py $(ARGS)

bench-engine-curves: $(BIN)/fonttools  ## learning curves of one job on the embedded engine and on vLLM, three seeds each (`penstock engines install vllm` first)
	$(BIN)/python benchmarks/engine_curves.py --out docs/results/engine_curves $(ARGS)

bench-online: $(BIN)/fonttools  ## accepted answers of an agent that learns from feedback, alone and beside a hostile key, three seeds each
	$(BIN)/python benchmarks/online.py --out docs/results/online $(ARGS)

fresh:  ## both commands of the README on a clean machine
	$(FRESH) . "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]' && .venv/bin/penstock demo"
	$(FRESH) . "python3 -m venv .venv && .venv/bin/pip install -q -e '.[dev]' && .venv/bin/pytest -q"

package: $(BIN)/pytest  ## sdist and wheel into dist/
	rm -rf dist
	$(BIN)/pip -q install build
	$(BIN)/python -m build

release: check docs package  ## everything that must hold before a tag
	@grep -q "^## \[$$($(BIN)/python -c 'import penstock; print(penstock.__version__)')\]" CHANGELOG.md \
	  || { echo "CHANGELOG.md has no section for this version"; exit 1; }
	@git diff --quiet && git diff --cached --quiet || { echo "the working tree is not clean"; exit 1; }
	@echo "ready: git tag v$$($(BIN)/python -c 'import penstock; print(penstock.__version__)')"

clean:  ## remove what the verbs above made
	rm -rf dist build site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
