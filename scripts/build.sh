#!/usr/bin/env bash
# Configures and builds one preset in build/PRESET-ABI.
# SPDX-License-Identifier: Apache-2.0
#
# usage: build.sh PRESET [TARGET...]   environment: PYTHON, JOBS, PGQA_CUDA, PGQA_CUDA_ARCHITECTURES
source "$(dirname "$0")/common.sh"
find_python

preset="$1"
shift
folder="build/$preset-$PGQA_ABI"
arguments=(-DPython_EXECUTABLE="$PGQA_ENV_PYTHON")
if [[ -n "${PGQA_CUDA:-}" ]]; then
  arguments+=(-DPGQA_CUDA="$PGQA_CUDA")
fi
architectures="${PGQA_CUDA_ARCHITECTURES:-}"
if [[ -z "$architectures" && "$preset" == dev ]]; then
  architectures="$(gpu_architectures)"
fi
if [[ -n "$architectures" ]]; then
  arguments+=(-DPGQA_CUDA_ARCHITECTURES="$architectures")
fi

export PGQA_ABI_SUFFIX="-$PGQA_ABI"
mkdir -p "$folder"
cmake --preset "$preset" "${arguments[@]}" >"$folder/configure.log" 2>&1 || {
  cat "$folder/configure.log" >&2
  die "configuring $folder failed"
}
grep -A3 "^CMake Warning" "$folder/configure.log" >&2 || true
targets=()
if (($#)); then
  targets=(--target "$@")
fi
cmake --build "$folder" --parallel "${JOBS:-$(nproc)}" "${targets[@]}" ||
  die "building $folder failed"
