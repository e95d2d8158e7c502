# Script: copies the shared libraries that BINARIES need and no bare system has into their folder.
# SPDX-License-Identifier: Apache-2.0
#
# KIND is MODULES or EXECUTABLES, as for file(GET_RUNTIME_DEPENDENCIES); SEARCH is a further folder.
# All BINARIES lie in one folder.

list(GET BINARIES 0 first)
get_filename_component(folder "${first}" DIRECTORY)
file(GLOB gathered_before "${folder}/libabsl_*" "${folder}/libcudart*")
if(gathered_before)
  file(REMOVE ${gathered_before})
endif()

set(wanted "^libabsl_")
if(KIND STREQUAL "EXECUTABLES")
  list(APPEND wanted "^libcudart")
endif()
file(GET_RUNTIME_DEPENDENCIES
  ${KIND} ${BINARIES}
  DIRECTORIES ${SEARCH}
  PRE_INCLUDE_REGEXES ${wanted}
  PRE_EXCLUDE_REGEXES ".*"
  RESOLVED_DEPENDENCIES_VAR libraries
  UNRESOLVED_DEPENDENCIES_VAR missing)
if(missing)
  message(FATAL_ERROR "${BINARIES} need ${missing}, found nowhere")
endif()
foreach(library IN LISTS libraries)
  get_filename_component(name "${library}" NAME)
  get_filename_component(file "${library}" REALPATH)
  configure_file("${file}" "${folder}/${name}" COPYONLY)
endforeach()
