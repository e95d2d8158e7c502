# Commands of the project; `make help` lists them. Everything is done by scripts/ and CMake.
# SPDX-License-Identifier: Apache-2.0
#
# Variables: PYTHON (interpreter), PRESET (see CMakePresets.json), JOBS, PGQA_CUDA (AUTO, ON, OFF),
# PGQA_CUDA_ARCHITECTURES, ARGS (passed on by selfcheck, evaluate, test-gpu and bench).
.DEFAULT_GOAL := help
.PHONY: help setup build selfcheck test test-gpu gpu-bundle evaluate bench format format-check clean
export PYTHON PRESET JOBS PGQA_CUDA PGQA_CUDA_ARCHITECTURES ARGS

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## install what is missing: Debian packages (as root), virtual environment, Python packages
	@scripts/setup.sh

build: ## build everything that this machine can compile
	@scripts/task.sh build

selfcheck: ## set up, build and run the visible evaluation
	@scripts/task.sh selfcheck

test: ## set up, build and run every test that this machine can run
	@scripts/task.sh test

test-gpu: ## the GPU tests: ARGS=quick (4 minutes) or ARGS=full (9 minutes)
	@scripts/task.sh test-gpu

gpu-bundle: ## gather module and test programs in build/bundle, to be carried to a GPU machine
	@scripts/task.sh gpu-bundle

evaluate: ## the sealed evaluation: ARGS='SPEC.json [options]', by default the visible spec
	@scripts/task.sh evaluate

bench: ## the benchmarks
	@scripts/task.sh bench

format: ## format C++ and CUDA sources
	@scripts/format.sh

format-check: ## check the format
	@scripts/format.sh --check

clean: ## remove builds and placed modules; the virtual environment stays
	@rm -rf build python/pgqa/*.so* methods/main/*.so*
