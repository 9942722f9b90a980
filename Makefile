# Everything a fresh clone needs: `make train` runs the main job, `make test` proves the contracts.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TRAIN := .venv/.ready-to-train
RANKS ?= auto
ARGS ?=
# Without restarts: after one, the scheduler waits for ever for tests that nobody has. A test that ends its worker, as
# one that hangs does, then ends the run, and is named.
SIDE_BY_SIDE := --numprocesses auto --dist loadfile --max-worker-restart 0

.PHONY: help train quick test test-isa lint unit fuzz docs bench-collectives bench-training bench-overhead bench-memory bench-backend bench-cluster bench-averaging bench-convergence bench-precision bench-edits bench-resnet clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

# What the package and its report need, and nothing else: the first command should train as soon as it can.
$(READY_TO_TRAIN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[report,live]'
	touch $@

$(READY): $(READY_TO_TRAIN)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,test,report,live]'
# Not in an extra: what timm depends on brings a torchvision for CUDA. The tests need its optimizers only.
	$(BIN)/python -m pip install --quiet --no-deps 'timm>=1.0.20'
	touch $@

train: $(READY_TO_TRAIN) ## train a small GPT on RANKS ranks (one per core, at most 8), and write a report; ARGS: more options
	$(BIN)/sherd train gpt --ranks $(RANKS) $(ARGS)

quick: lint ## linters, types, layers and the tests that start no process: under 90 s on two cores
	$(BIN)/python -m pytest -m '(pure or fake) and not fuzz' $(SIDE_BY_SIDE)

test: lint unit ## linters, types, layers and all tests

lint: $(READY) ## ruff, mypy --strict and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY) ## all tests
	$(BIN)/python -m pytest -m 'not fuzz and not alone' $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m 'alone and not fuzz'

test-isa: $(READY) ## the bitwise tests as on weaker CPUs: with lower instruction sets; prints what took effect
	$(BIN)/python -m tests.instruction_sets

fuzz: $(READY) ## long randomised runs
	$(BIN)/python -m pytest -m fuzz --timeout 1200

docs: $(READY) ## write docs/what-works.md from the tests
	$(BIN)/python -m tests.what_works

bench-collectives: $(READY) ## gloo and the host transport, interleaved in one run
	$(BIN)/python -m benchmarks.collectives

.venv/.bench: $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench-training: .venv/.bench ## sherd and its peers on one GPT with default and fused AdamW, interleaved in one run
	$(BIN)/python -m benchmarks.training $(ARGS)

bench-overhead: $(READY) ## small models at 1, 2 and 4 ranks against torch DDP and the plain loop: 14 minutes on two cores
	$(BIN)/python -m benchmarks.overhead $(ARGS)

bench-memory: $(READY) ## host memory at 2, 4 and 8 ranks against what one plain process takes; needs 4 GB
	$(BIN)/python -m benchmarks.training --memory $(ARGS)

bench-backend: $(READY) ## torch's DDP and FSDP2 over the sherd backend and over gloo
	$(BIN)/python -m benchmarks.backend

bench-cluster: $(READY) ## sherd and torch's own on two hosts with 1 Gbit/s between them; needs root
	$(BIN)/python -m benchmarks.cluster

bench-averaging: $(READY) ## diloco, at once and in fragments, beside ddp on two hosts with 100 Mbit/s between them; needs root
	$(BIN)/python -m benchmarks.cluster --averaging $(ARGS)

bench-convergence: $(READY) ## held-out loss and bytes of diloco and gossip beside ddp, on four ranks
	$(BIN)/python -m benchmarks.convergence $(ARGS)

bench-precision: $(READY) ## training loss in fp32, bf16, fp16 and under autocast
	$(BIN)/python -m benchmarks.precision $(ARGS)

bench-edits: $(READY) ## what looking for edits of parameters costs a step without any
	$(BIN)/python -m benchmarks.edits

bench-resnet: $(READY) ## ResNet-50 on 2 and 4 ranks, and in one process on one core and on all
	$(BIN)/python -m benchmarks.resnet

clean: ## remove the environment and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build src/*.egg-info
