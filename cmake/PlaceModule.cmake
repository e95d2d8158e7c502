# Script: copies the files of FROM into every folder of TO, only where they differ.
# SPDX-License-Identifier: Apache-2.0
#
# By rename, so that a running process keeps the file that it has mapped.

file(GLOB files RELATIVE "${FROM}" "${FROM}/*")
foreach(folder IN LISTS TO)
  file(MAKE_DIRECTORY "${folder}")
  foreach(name IN LISTS files)
    set(target "${folder}/${name}")
    file(SHA256 "${FROM}/${name}" wanted)
    set(present "")
    if(EXISTS "${target}")
      file(SHA256 "${target}" present)
    endif()
    if(NOT present STREQUAL wanted)
      file(COPY_FILE "${FROM}/${name}" "${target}.new.so")
      file(RENAME "${target}.new.so" "${target}")
    endif()
  endforeach()
endforeach()
