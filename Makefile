# Every target sets up what it needs. Extra arguments: make demo DEMO_ARGS="--seed 2", make test TEST_ARGS="-k gate".
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-vllm check docs bench clean

DEMO_ARGS ?=
TEST_ARGS ?=
BENCH ?= --list

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1 ~\2/p' Makefile | tr '~' '\t' | expand -t 18

setup: ## make .venv with everything that development needs
	scripts/setup --profile test

demo: ## serve, learn, gate, swap and roll back on a small real model (about nine minutes)
	scripts/setup --profile demo
	.venv/bin/tidegate demo $(DEMO_ARGS)

test: setup ## run the whole test suite
	scripts/test $(TEST_ARGS)

test-vllm: setup ## run the engine contract and the whole way from request to rollback over a real vLLM (installs it; minutes)
	.venv/bin/tidegate engine install vllm
	scripts/test -m vllm tests/contracts/test_engine_contract.py tests/e2e/test_real_vllm.py $(TEST_ARGS)

check: setup ## lint, format, types, layering
	scripts/check

docs: setup ## build the documentation into docs/_build
	scripts/docs

bench: setup ## run a benchmark: make bench BENCH="loop --json"
	scripts/bench $(BENCH)

clean: ## remove what tests, docs and tools leave; keeps .venv, runs and data
	rm -rf docs/_build .coverage .coverage.* .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
