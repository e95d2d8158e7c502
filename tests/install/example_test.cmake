# Test: installs BUILD into a fresh prefix, builds EXAMPLE, which finds it there, and runs it where OUTPUT is given.
# SPDX-License-Identifier: Apache-2.0
#
# OUTPUT is a regular expression for all that the program prints.

file(REMOVE_RECURSE "${WORK}")
get_filename_component(name "${EXAMPLE}" NAME)

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
if(NOT DEFINED OUTPUT)
  return()
endif()
execute_process(COMMAND "${WORK}/build/${name}" OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE result)
if(result OR NOT output MATCHES "^${OUTPUT}\n$")
  message(FATAL_ERROR "${name} ended with ${result} and printed '${output}', expected '${OUTPUT}'")
endif()
