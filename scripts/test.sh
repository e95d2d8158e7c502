#!/usr/bin/env bash
# Runs every test that this machine can run; ends with what was skipped and why, then the totals.
# SPDX-License-Identifier: Apache-2.0
#
# usage: test.sh PRESET   (built before)
source "$(dirname "$0")/common.sh"
find_python

folder="build/$1-$PGQA_ABI"
results="$folder/results"
rm -rf "$results"
mkdir -p "$results"
notes=()  # COUNT=REASON of tests that no result file names
status=0

run_ctest() {
  say "C++ tests, label $1"
  ctest --test-dir "$folder" -L "^$1\$" --no-tests=error --output-on-failure \
    --output-junit "$ROOT/$results/ctest-$1.xml" >"$results/ctest-$1.log" 2>&1 || status=1
  # Of passed tests only the total is shown.
  grep -Ev '^ +Start +[0-9]+:|   Passed +[0-9.]+ sec' "$results/ctest-$1.log" || true
}

run_ctest host
gpu_tests="$(ctest --test-dir "$folder" -N -L '^gpu$' | sed -n 's/^Total Tests: //p')"
if [[ "$gpu_tests" != 0 ]]; then
  if has_gpu; then
    run_ctest gpu
  else
    notes+=("$gpu_tests=C++ GPU tests: built, not run, this machine has no GPU")
  fi
elif has_nvcc; then
  notes+=("0=C++ GPU tests: not built, PGQA_CUDA=OFF")
elif has_gpu; then
  notes+=("0=C++ GPU tests: not built, this machine has a GPU but no nvcc: $NVCC_ADVICE")
else
  notes+=("0=C++ GPU tests: not built, no nvcc and no GPU on this machine")
fi

say "Python tests"
"$PGQA_ENV_PYTHON" -m pytest -q -p no:cacheprovider --junitxml="$results/pytest.xml" ||
  status=1
"$PGQA_ENV_PYTHON" scripts/test_summary.py "$results" "${notes[@]}" || status=1
exit "$status"
