# The documented workflows. `make` or `make help` lists them; each target makes the environment itself when it needs it.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TASKS ?= examples/arithmetic.py#               # tasks, separated by spaces
MODELS ?= scripted/good scripted/mixed#        # models, separated by spaces
BACKEND ?= local#                              # where workers run: local, ec2 or batch
WORKERS ?= 2#                                  # workers at the most
ARGS ?=#                                       # any other option of `ct run eval`, such as ARGS="--limit 10"
RUN_ID ?=#                                     # the run that status, summarize, promote and report are about
SEEDS ?= 20#                                   # how many random schedules `make chaos` plays
CHAOS_SEEDS ?= 5#                              # the same for `make e2e`
NAMES ?=#                                      # which benchmarks `make bench` runs, such as "fleet controller"

# `make … VENV=/some/venv` uses an environment as it is. Otherwise .venv is made, and made again when the lock file changes.
ifeq ($(origin VENV),command line)
ENV :=
else
VENV := .venv
ENV := .venv/.compiled
endif
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
PACKAGES := worker/evalworker scripts/evalops

.PHONY: help
help: ## This list
	@echo "Inspect Fleet: Inspect evaluations on a fleet of workers. Start with: make eval"
	@echo
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@awk -F '#' '/^[A-Z_]+ [?]=.*#  / { split($$1, set, / [?]= ?/); sub(/^ +/, "", $$3); \
		printf "  %-12s %s (default: %s)\n", set[1], $$3, set[2] == "" ? "none" : set[2] }' $(MAKEFILE_LIST)

# Running

RUN_local = $(BIN)/ct run eval --local --max-workers $(WORKERS)
RUN_ec2   = $(BIN)/ct run eval --ec2 --max-workers $(WORKERS)
RUN_batch = $(BIN)/ies run aws
quoted    = $(foreach word,$(1),$(2)'$(word)')

.PHONY: eval
eval: $(ENV) ## Run TASKS with every one of MODELS and stream the scores
	@$(if $(RUN_$(strip $(BACKEND))),,echo "make: BACKEND=$(BACKEND) is none of local, ec2, batch" >&2; exit 2)
	@$(RUN_$(strip $(BACKEND))) $(call quoted,$(TASKS)) $(call quoted,$(MODELS),--model ) $(ARGS)

# From logs to the dashboard

ABOUT = $(if $(RUN_ID),--run-id $(RUN_ID),$(error say which run: make $@ RUN_ID=…, see `ies status list`))

.PHONY: status
status: $(ENV) ## What a run is doing: states, scores, cost
	@$(BIN)/ies status check $(ABOUT) $(ARGS)

.PHONY: summarize
summarize: $(ENV) ## Make the dashboard's files beside a run's logs
	@$(BIN)/ies summarize $(ABOUT) $(ARGS)

.PHONY: promote
promote: $(ENV) ## Move a run's dashboard files to the staging area
	@$(BIN)/ies promote $(ABOUT) $(ARGS)

.PHONY: report
report: $(ENV) ## Write a run's HTML report
	@$(BIN)/ies report $(ABOUT) $(ARGS)

# Checking

# take minutes, and belong to `make e2e` for that alone
MINUTES := $(addprefix tests/integration/test_,ec2_fleet.py docs_commands.py faults.py)

.PHONY: test
test: $(ENV) ## Unit and integration tests; need no Docker and no AWS
	$(PYTEST) tests/integration tests/unit $(MINUTES:%=--ignore=%) -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: lint
lint: $(ENV) ## Style, types, Terraform's format, shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(if $(wildcard terraform/*.tf),terraform fmt -check -recursive terraform)
	@command -v shellcheck >/dev/null || { echo "make: shellcheck is not installed (apt-get install shellcheck)" >&2; exit 1; }
	git ls-files -z ':!*.tftpl' | xargs -0 grep -lIsE '^#!.*\b(ba|da)?sh\b' | xargs shellcheck

.PHONY: e2e
e2e: $(ENV) ## End-to-end and chaos tests; need what .ci/run installs
	tests/e2e/setup.sh
	CHAOS_SEEDS=$(CHAOS_SEEDS) EC2_CHAOS_SEEDS=2 $(PYTEST) tests/e2e tests/chaos $(MINUTES) $(side_by_side)

.PHONY: chaos
chaos: $(ENV) ## Kill, freeze and starve a fleet and fail its AWS in SEEDS random schedules
	tests/e2e/setup.sh
	CHAOS_SEEDS=$(SEEDS) EC2_CHAOS_SEEDS=$(SEEDS) MACHINE_CHAOS_SEEDS=$(SEEDS) \
		$(PYTEST) tests/chaos tests/e2e/test_ec2_boots.py::test_machines_die_on_an_aws_that_fails_and_doubles $(side_by_side)

# what is made once for many tests keeps them in one process, see tests/conftest.py
side_by_side = -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: bench
bench: $(ENV) ## Measure all figures, or those of NAMES, with their bounds
	$(BIN)/python tests/bench $(NAMES)

.PHONY: bench-ec2
bench-ec2: $(ENV) ## A shell whose AWS is emulated, with containers for EC2 instances (RUN="…" runs a command instead)
	@tests/e2e/setup.sh
	@$(BIN)/python tests/e2e/fleet_bench.py $(RUN)

# Keeping

.PHONY: docs
docs: $(ENV) ## Write docs/cli.md anew from the commands
	$(BIN)/python -m evalops.docs_cli > docs/cli.md.new && mv docs/cli.md.new docs/cli.md

.PHONY: clean
clean: ## Remove the environment and all caches; logs/ stays
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Bytecode is compiled here, because a machine may be told not to write it: without it Inspect's import takes twice as long.
.venv/.synced: uv.lock pyproject.toml
	@echo "make: installing what uv.lock names into .venv" >&2
	@UV_PROJECT_ENVIRONMENT=.venv scripts/uv.sh sync --quiet --frozen --compile-bytecode
	@touch $@

.venv/.compiled: .venv/.synced $(shell find $(PACKAGES) -name '*.py')
	@$(BIN)/python -m compileall -q $(PACKAGES)
	@touch $@

-include mk/*.mk terraform/infra.mk
