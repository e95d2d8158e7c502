#!/usr/bin/env bash
# All tests that need a GPU, in a fixed time: quick 4 minutes, full 9; ends with "N passed, N failed".
# SPDX-License-Identifier: Apache-2.0
#
# usage: tests/run_gpu.sh quick|full [FOLDER]
#
# FOLDER holds module/ and test-programs/: a carried build/bundle (the default where there is one) or a build folder
# (else the default is the newest). Every part has a time budget of its own; one that runs out of it, crashes or can
# not start counts as failed. PYTHON chooses the interpreter. Logs and JUnit files go to build/gpu-results.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

mode="${1:-}"
case "$mode" in
  quick) limit=236 ;;
  full) limit=536 ;;
  *)
    sed -n '5s/^# //p' "$0" >&2
    exit 2
    ;;
esac

folder="${2:-build/bundle}"
if [[ -z "${2:-}" && ! -d "$folder" ]]; then
  newest="$(find build -mindepth 2 -maxdepth 2 -name test-programs -printf '%T@ %h\n' 2>/dev/null | sort -n | tail -1)"
  folder="${newest#* }"
fi
if [[ ! -d "$folder/module" || ! -d "$folder/test-programs" ]]; then
  echo "tests/run_gpu.sh: no module/ and test-programs/ in '$folder': make gpu-bundle makes them where nvcc is" >&2
  exit 2
fi
if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
sanitizer="$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)"
programs="$folder/test-programs"
results=build/gpu-results
rm -rf "$results"
mkdir -p "$results"

# The package and the solver look for the module beside their sources.
for place in python/pgqa methods/main; do
  rm -f "$place"/*.so*
  cp "$folder"/module/* "$place/"
done

# record NAME STATUS: a JUnit file with one test, failed unless STATUS is 0.
record() {
  local failure=""
  [[ "$2" == 0 ]] || failure="<failure message=\"exit status $2\"/>"
  echo "<testsuite name=\"$1\"><testcase name=\"$1\" classname=\"run_gpu\">$failure</testcase></testsuite>" \
    >"$results/part-$1.xml"
}

# run NAME SECONDS COMMAND...: within SECONDS and what is left of the whole. A command that writes $results/NAME.xml
# reports its own failures there, with exit status 1; all else is recorded here.
run() {
  local name="$1" budget="$2" left=$((limit - SECONDS)) start=$SECONDS status=124
  shift 2
  if ((budget > left)); then budget=$left; fi
  if ((budget > 0)); then
    timeout --kill-after=3 "$budget" "$@" >"$results/$name.log" 2>&1
    status=$?
  fi
  printf '%-28s %4d s of %3d, status %d\n' "$name" $((SECONDS - start)) "$budget" "$status"
  if [[ "$status" == 0 && "$name" == @(selfcheck|bench) ]]; then
    cat "$results/$name.log"
  elif [[ "$status" != 0 ]]; then
    tail -n 40 "$results/$name.log"
  fi
  if [[ ! -s "$results/$name.xml" ]]; then
    record "$name" "$status"
  elif [[ "$status" != 0 && "$status" != 1 ]]; then
    record "$name-status" "$status"
  fi
}

gtest() { # gtest SECONDS PROGRAM
  run "$2" "$1" "$programs/$2" --gtest_brief=1 "--gtest_output=xml:$results/$2.xml"
}

python_tests() { # python_tests SECONDS MARKERS
  run pytest "$1" "$PYTHON" -m pytest tests/python -q -m "$2" -p no:cacheprovider --durations=15 --tb=short \
    "--junitxml=$results/pytest.xml"
}

sanitize() { # sanitize SECONDS TOOL FILTER [PROGRAM]
  run "$2${4:+-$4}" "$1" "$sanitizer" --tool "$2" --error-exitcode 9 --print-limit 5 "$programs/${4:-decode_test}" \
    --gtest_brief=1 "--gtest_filter=$3"
}

specs='Small/DecodeSpecs'

if [[ "$mode" == quick ]]; then
  gtest 20 decode_test
  gtest 20 device_plan_test
  gtest 10 step_plan_test
  gtest 10 block_table_gpu_test
  gtest 15 workspace_test
  gtest 10 append_gpu_test
  gtest 10 cuda_graph_test
  gtest 30 decode_graph_test
  python_tests 110 "gpu and not slow and not large"
  sanitize 25 memcheck "$specs.MeetsTheReference/0:$specs.MeetsTheReference/4:DecodeMerge.Many*:*EveryValueAbsurd"
  sanitize 20 racecheck "$specs.MeetsTheReference/0:$specs.MeetsTheReference/3"
  run selfcheck 35 "$PYTHON" selfcheck.py --filter recorded
  run bench 25 "$PYTHON" bench/bench.py --quick --only cases --launches 31
else
  gtest 30 decode_test
  gtest 30 device_plan_test
  gtest 15 step_plan_test
  gtest 15 block_table_gpu_test
  gtest 20 workspace_test
  gtest 20 append_gpu_test
  gtest 20 cuda_graph_test
  gtest 45 decode_graph_test
  python_tests 290 gpu
  sanitize 60 memcheck "*"
  sanitize 20 memcheck "Append.*-*EveryLayout" append_gpu_test
  sanitize 20 memcheck "DecodeGraph.*" decode_graph_test
  sanitize 20 memcheck "*StepPlan*" step_plan_test
  sanitize 50 racecheck "$specs.MeetsTheReference/*:DecodeMerge.ManyRequests*"
  sanitize 30 initcheck "$specs.NeverReadsUnusedSlots/*:DecodeMerge.ManyRequests*:DecodeBatch.*"
  sanitize 20 synccheck "$specs.MeetsTheReference/*:DecodeMerge.ManyRequests*"
  run selfcheck 110 "$PYTHON" selfcheck.py --json "$results/selfcheck.json"
  run bench 40 "$PYTHON" bench/bench.py --quick --launches 31
fi

"$PYTHON" scripts/test_summary.py "$results"
