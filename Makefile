.DEFAULT_GOAL := help
.PHONY: help setup train test test-all bench lint

# Passed on to the command of the target, e.g. make train ARGS="--train-iters 50"
ARGS ?=
BIN := .venv/bin

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: ## Create .venv with the pinned packages (PYTHON=... picks the interpreter of a new one)
	@scripts/setup

train: setup ## Train a small GPT on real text with stock Megatron and --use-megatron-fsdp-v2
	@$(BIN)/mfsdp2 train $(ARGS)

test: setup ## Unit, functional and gpu tests, without the full matrices
	@$(BIN)/python -m pytest $(ARGS)

test-all: setup ## All tests, the full matrices included
	@$(BIN)/python -m pytest -m "" $(ARGS)

bench: setup ## Measure against PyTorch FSDP2 and DDP
	@$(BIN)/python -m benchmarks $(ARGS)

lint: setup ## Style, formatting, types and import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
