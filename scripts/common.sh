# Sourced by the scripts: paths, what this machine has, and failures that take one line.
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

say() { printf 'pgqa: %s\n' "$*"; }
die() {
  printf 'pgqa: %s\n' "$*" >&2
  exit 1
}

has_gpu() {
  [[ -n "$(compgen -G '/dev/nvidia[0-9]*')" ]] || nvidia-smi -L 2>/dev/null | grep -q GPU
}

has_nvcc() { command -v nvcc >/dev/null || [[ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]]; }

NVCC_ADVICE="install the CUDA 13 toolkit so that nvcc is on PATH or in /usr/local/cuda/bin"

# Architectures of the GPUs at hand for PGQA_CUDA_ARCHITECTURES, or nothing: 9.0 is built as 90a.
gpu_architectures() {
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
    sed -n 's/^\([0-9]\+\)\.\([0-9]\)$/\1\2/p' | sed 's/^90$/90a/' | sort -un | paste -sd';'
}

# Turns PYTHON into PGQA_INTERPRETER (what an environment is made from), PGQA_ABI (cp311) and
# PGQA_ENV_PYTHON (the interpreter that builds and runs). A PYTHON that already belongs to a virtual
# environment is used as it is; else the environment is .venv, or .venv-cpXY for a PYTHON of another
# ABI than python3's.
find_python() {
  local python="${PYTHON:-python3}" own
  command -v "$python" >/dev/null ||
    die "no ${python}: apt-get install python3 python3-venv, or set PYTHON"
  local probe='import sys
print(sys.executable, "cp%d%d" % sys.version_info[:2], int(sys.prefix != sys.base_prefix))'
  read -r PGQA_INTERPRETER PGQA_ABI own < <("$python" -c "$probe")
  case "$PGQA_ABI" in
    cp310 | cp311 | cp312 | cp313 | cp314) ;;
    *) die "${python} is ${PGQA_ABI}, but torch 2.11 needs Python 3.10 to 3.14: set PYTHON" ;;
  esac
  PGQA_VENV="$ROOT/.venv"
  if [[ -n "${PYTHON:-}" ]]; then
    if [[ "$own" == 1 ]]; then
      PGQA_VENV="$(dirname "$(dirname "$PGQA_INTERPRETER")")"
    elif [[ "$PGQA_ABI" != "$(python3 -c "$probe" 2>/dev/null | cut -d' ' -f2)" ]]; then
      PGQA_VENV="$ROOT/.venv-$PGQA_ABI"
    fi
  fi
  PGQA_ENV_PYTHON="$PGQA_VENV/bin/python"
}

# The preset to build: PRESET where set; else `cpu` or `dev` by `want` (run: what this machine
# runs; test: all that it compiles).
choose_preset() {
  local want="$1"
  if [[ -n "${PRESET:-}" ]]; then
    echo "$PRESET"
  elif [[ "${PGQA_CUDA:-AUTO}" == ON ]]; then
    echo dev
  elif [[ "${PGQA_CUDA:-AUTO}" == AUTO ]] && has_nvcc && { [[ "$want" == test ]] || has_gpu; }; then
    echo dev
  else
    echo cpu
  fi
}
