# Finds the Python interpreter and the torch inside it, without torch's own CMake package.
# SPDX-License-Identifier: Apache-2.0
#
# find_package(Torch) rewrites the CUDA flags, needs a CUDA toolkit and puts absolute paths into
# RPATH. The binding needs only header folders and library names, and torch is loaded before it.

# Sets `result` to ON and defines the target pgqa_torch, or fails when PGQA_PYTHON is ON.
# A macro, since find_package(Python) must leave its commands and variables to the caller.
macro(pgqa_find_python_torch result)
  if(NOT Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV}
     AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  endif()
  set(_quiet QUIET)
  if(PGQA_PYTHON STREQUAL "ON")
    set(_quiet REQUIRED)
  endif()
  find_package(Python 3.10 ${_quiet} COMPONENTS Interpreter Development.Module)

  set(_torch_root "")
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(EXISTS "${_torch_root}/include/torch/extension.h")
    set(${result} ON)
    pgqa_add_torch_target("${_torch_root}")
  elseif(PGQA_PYTHON STREQUAL "ON")
    message(FATAL_ERROR "PGQA_PYTHON=ON needs torch in ${Python_EXECUTABLE}: "
                        "run `make setup`, or pip install torch, or set PGQA_PYTHON=OFF")
  endif()
endmacro()

# pybind11 comes with torch's headers: the very version that torch's own casters are built with.
function(pgqa_add_torch_target torch_root)
  file(READ "${torch_root}/version.py" version_file)
  string(REGEX MATCH "__version__ = '([^']+)'" _ "${version_file}")
  message(STATUS "torch ${CMAKE_MATCH_1}: ${torch_root}")
  add_library(pgqa_torch INTERFACE)
  target_include_directories(pgqa_torch SYSTEM INTERFACE
    "${torch_root}/include" "${torch_root}/include/torch/csrc/api/include")
  target_link_directories(pgqa_torch INTERFACE "${torch_root}/lib")
  target_link_libraries(pgqa_torch INTERFACE torch torch_cpu torch_python c10)
  if(PGQA_WITH_CUDA)
    target_link_libraries(pgqa_torch INTERFACE c10_cuda)
  endif()
endfunction()
