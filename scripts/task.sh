#!/usr/bin/env bash
# One target of the Makefile that needs set-up and a build: task.sh NAME.
# SPDX-License-Identifier: Apache-2.0
source "$(dirname "$0")/common.sh"
task="$1"
read -ra arguments <<<"${ARGS:-}"

# What runs on the GPU can not do without a compiler for it; a run on the CPU must be asked for.
require_nvcc_beside_gpu() {
  if has_gpu && ! has_nvcc && [[ "${PGQA_CUDA:-AUTO}" != OFF ]]; then
    die "this machine has a GPU but no nvcc: $NVCC_ADVICE, or set PGQA_CUDA=OFF to run on the CPU"
  fi
}

# Without the kernels an evaluation runs on the CPU, even where torch finds a GPU.
use_cpu_where_cuda_is_off() {
  if has_gpu && [[ "${PGQA_CUDA:-AUTO}" == OFF && " ${ARGS:-} " != *" --device"* ]]; then
    arguments+=(--device cpu)
  fi
}

prepare() { # prepare PRESET [TARGET...]
  scripts/setup.sh
  find_python
  scripts/build.sh "$@"
}

case "$task" in
  build)
    require_nvcc_beside_gpu
    prepare "$(choose_preset test)"
    ;;
  selfcheck)
    require_nvcc_beside_gpu
    prepare "$(choose_preset run)" pgqa_place
    use_cpu_where_cuda_is_off
    exec "$PGQA_ENV_PYTHON" selfcheck.py "${arguments[@]}"
    ;;
  evaluate)
    require_nvcc_beside_gpu
    prepare "$(choose_preset run)" pgqa_place
    use_cpu_where_cuda_is_off
    exec "$PGQA_ENV_PYTHON" evaluate.py "${arguments[@]}"
    ;;
  test)
    preset="$(choose_preset test)"
    prepare "$preset"
    exec scripts/test.sh "$preset"
    ;;
  test-gpu)
    has_gpu || die "this machine has no GPU: make gpu-bundle makes what to carry to one"
    require_nvcc_beside_gpu
    preset="$(choose_preset test)"
    prepare "$preset"
    exec tests/run_gpu.sh "${arguments[@]:-quick}"
    ;;
  gpu-bundle)
    has_nvcc || die "no nvcc: $NVCC_ADVICE"
    prepare gpu
    rm -rf build/bundle
    mkdir -p build/bundle
    cp -r "build/gpu-$PGQA_ABI/module" "build/gpu-$PGQA_ABI/test-programs" \
      "build/gpu-$PGQA_ABI/read-ceiling" build/bundle/
    find build/bundle -type f -perm -100 -exec strip --strip-unneeded {} +
    du -sh build/bundle
    ;;
  bench)
    require_nvcc_beside_gpu
    preset="$(choose_preset run)"
    prepare "$preset"
    folder="build/$preset-$PGQA_ABI"
    for program in "$folder"/bench-programs/*; do
      "$program"
    done
    if [[ -d "$folder/read-ceiling" ]] && has_gpu; then
      "$PGQA_ENV_PYTHON" bench/bench.py "${arguments[@]}"
    else
      say "GPU benchmark skipped: it needs a GPU and nvcc"
    fi
    ;;
  *) die "no task $task" ;;
esac
