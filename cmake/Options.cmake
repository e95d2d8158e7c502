# Options, and what they come to on this machine: PGQA_WITH_CUDA and PGQA_WITH_PYTHON.
# SPDX-License-Identifier: Apache-2.0

set(python_default AUTO)
if(NOT PROJECT_IS_TOP_LEVEL)
  set(python_default OFF)
endif()
set(PGQA_CUDA AUTO CACHE STRING "CUDA kernels and graphs: AUTO (where nvcc is found), ON or OFF")
set(PGQA_PYTHON ${python_default} CACHE STRING
    "Python module: AUTO (where the interpreter has torch), ON or OFF")
set_property(CACHE PGQA_CUDA PGQA_PYTHON PROPERTY STRINGS AUTO ON OFF)
set(PGQA_CUDA_ARCHITECTURES "80;90a;100" CACHE STRING "GPU architectures; the last also as PTX")
option(PGQA_TESTS "Build the tests (GoogleTest)" ${PROJECT_IS_TOP_LEVEL})
option(PGQA_BENCH "Build the C++ benchmarks (Google Benchmark)" OFF)
option(PGQA_WERROR "Turn warnings into errors" OFF)
option(PGQA_PLACE_MODULE "Copy the Python module into python/pgqa and methods/main"
       ${PROJECT_IS_TOP_LEVEL})
set(PGQA_SANITIZE "" CACHE STRING "Host sanitizers as for -fsanitize=, such as address,undefined")

foreach(option IN ITEMS PGQA_CUDA PGQA_PYTHON)
  if(NOT "${${option}}" MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${option} is '${${option}}', expected AUTO, ON or OFF")
  endif()
endforeach()

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

# "80;90a;100" becomes "80-real;90a-real;100": machine code for each, PTX once, for newer GPUs.
function(pgqa_expand_architectures result)
  if(NOT "${PGQA_CUDA_ARCHITECTURES}" MATCHES "^([89]|1[0-9])[0-9][af]?(-real|-virtual)?(;([89]|1[0-9])[0-9][af]?(-real|-virtual)?)*$")
    message(FATAL_ERROR "PGQA_CUDA_ARCHITECTURES is '${PGQA_CUDA_ARCHITECTURES}', expected a list such as "
                        "80;90a;100, each at least 80")
  endif()
  set(expanded ${PGQA_CUDA_ARCHITECTURES})
  list(POP_BACK expanded last)
  list(TRANSFORM expanded APPEND "-real" REGEX "^[0-9]+a?$")
  if(last MATCHES "^[0-9]+a$")
    string(APPEND last "-real")
  endif()
  set(${result} ${expanded} ${last} PARENT_SCOPE)
endfunction()

set(PGQA_WITH_CUDA OFF)
if(NOT PGQA_CUDA STREQUAL "OFF")
  find_program(PGQA_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
               PATHS /usr/local/cuda/bin)
  if(PGQA_NVCC)
    set(PGQA_WITH_CUDA ON)
  elseif(PGQA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PGQA_CUDA=ON needs nvcc on PATH or in /usr/local/cuda/bin: "
                        "install the CUDA 13 toolkit, or set PGQA_CUDA=OFF")
  endif()
endif()
if(PGQA_WITH_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${PGQA_NVCC}")
  endif()
  pgqa_expand_architectures(CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

set(PGQA_WITH_PYTHON OFF)
if(NOT PGQA_PYTHON STREQUAL "OFF")
  include(cmake/PythonTorch.cmake)
  pgqa_find_python_torch(PGQA_WITH_PYTHON)
endif()

message(STATUS "pgqa ${PROJECT_VERSION}: CUDA ${PGQA_WITH_CUDA}, Python ${PGQA_WITH_PYTHON}, "
               "tests ${PGQA_TESTS}, benchmarks ${PGQA_BENCH}, ${CMAKE_BUILD_TYPE}")
