# Install and export rules: component `cpp` for find_package(pgqa), component `python` for wheels.
# SPDX-License-Identifier: Apache-2.0

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/pgqa")
set(libraries pgqa_plan)
if(PGQA_WITH_CUDA)
  list(APPEND libraries pgqa_cuda pgqa_graphs)
endif()
install(TARGETS ${libraries} EXPORT pgqaTargets COMPONENT cpp)
install(DIRECTORY include/pgqa DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT cpp)
install(EXPORT pgqaTargets NAMESPACE pgqa:: DESTINATION "${package_dir}" COMPONENT cpp)
configure_package_config_file(cmake/pgqaConfig.cmake.in "${PROJECT_BINARY_DIR}/pgqaConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/pgqaConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/pgqaConfig.cmake"
              "${PROJECT_BINARY_DIR}/pgqaConfigVersion.cmake"
        DESTINATION "${package_dir}" COMPONENT cpp)
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATADIR}/pgqa" COMPONENT cpp)

if(PGQA_WITH_PYTHON)
  install(DIRECTORY "${PROJECT_BINARY_DIR}/module/" DESTINATION pgqa COMPONENT python
          EXCLUDE_FROM_ALL)
endif()
