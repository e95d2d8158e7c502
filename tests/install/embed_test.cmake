# Test: installs BUILD into a fresh prefix, then builds and runs EXAMPLE, which finds it there.
# SPDX-License-Identifier: Apache-2.0

file(REMOVE_RECURSE "${WORK}")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(result)
    string(JOIN " " command ${ARGN})
    message(FATAL_ERROR "failed with ${result}: ${command}")
  endif()
endfunction()

run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/prefix")
run("${CMAKE_COMMAND}" -S "${EXAMPLE}" -B "${WORK}/build" "-DCMAKE_PREFIX_PATH=${WORK}/prefix")
run("${CMAKE_COMMAND}" --build "${WORK}/build")
execute_process(COMMAND "${WORK}/build/cpp_embed" OUTPUT_VARIABLE output RESULT_VARIABLE result)
if(result OR NOT output STREQUAL "OK: 0.5 0\n")
  message(FATAL_ERROR "cpp_embed ended with ${result} and printed '${output}', expected 'OK: 0.5 0'")
endif()
