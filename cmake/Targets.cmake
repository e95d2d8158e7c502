# Settings shared by all targets: language level, warnings, RPATH, gathering of libraries.
# SPDX-License-Identifier: Apache-2.0

# Binaries find what lies beside them and nothing else by path. DT_RPATH, not DT_RUNPATH, since
# abseil's libraries carry no path of their own and need the one of the binary that loads them.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
add_link_options(LINKER:--disable-new-dtags)

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Language level, visibility, warnings and sanitizers of one target of this project.
function(pgqa_target_defaults target)
  set_target_properties(${target} PROPERTIES
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(PGQA_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror>
      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>)
  endif()
  if(PGQA_WITH_CUDA)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${PGQA_FATBIN_FLAG}>)
  endif()
  if(PGQA_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PGQA_SANITIZE};-fno-omit-frame-pointer>)
    target_link_options(${target} PRIVATE -fsanitize=${PGQA_SANITIZE})
  endif()
endfunction()

if(PGQA_WITH_CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(PGQA_FATBIN_FLAG --compress-mode=size)
  else()
    set(PGQA_FATBIN_FLAG -Xfatbin=-compress-all)
  endif()
endif()

# Adds the target `name`: copies the abseil and cudart libraries that the built targets named after
# it need into their common folder. cudart only for programs: in the module it must be the one that
# torch has loaded.
function(pgqa_gather_libraries name)
  list(GET ARGN 0 first)
  get_target_property(type ${first} TYPE)
  set(kind MODULES)
  if(type STREQUAL "EXECUTABLE")
    set(kind EXECUTABLES)
  endif()
  list(TRANSFORM ARGN REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE files)
  set(stamp "${CMAKE_CURRENT_BINARY_DIR}/${name}.stamp")
  add_custom_command(OUTPUT "${stamp}"
    COMMAND "${CMAKE_COMMAND}" -DKIND=${kind} "-DBINARIES=${files}"
            "-DSEARCH=${CUDAToolkit_LIBRARY_DIR}"
            -P "${PROJECT_SOURCE_DIR}/cmake/GatherLibraries.cmake"
    COMMAND "${CMAKE_COMMAND}" -E touch "${stamp}"
    DEPENDS ${ARGN} "${PROJECT_SOURCE_DIR}/cmake/GatherLibraries.cmake"
    COMMENT "Gathering shared libraries beside ${first}"
    VERBATIM)
  add_custom_target(${name} ALL DEPENDS "${stamp}")
endfunction()

# Warns of sources beside this CMakeLists.txt that `target` does not list; further arguments are
# sources left out on purpose.
function(pgqa_check_sources target)
  get_target_property(listed ${target} SOURCES)
  file(GLOB unlisted RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" *.cpp *.cu)
  list(REMOVE_ITEM unlisted ${listed} ${ARGN})
  if(unlisted)
    set(severity WARNING)
    if(PGQA_WERROR)
      set(severity FATAL_ERROR)
    endif()
    message(${severity} "not listed in ${CMAKE_CURRENT_SOURCE_DIR}/CMakeLists.txt: ${unlisted}")
  endif()
endfunction()
