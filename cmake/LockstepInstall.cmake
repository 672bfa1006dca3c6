# Rules for cmake --install: programs in bin, modules in lib, headers in include/lockstep, the completion for bash, and
# the files for find_package(Lockstep).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(config_folder "${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep")

foreach(target IN LISTS LOCKSTEP_MODULES)
  string(REGEX REPLACE "^lockstep_" "" name "${target}")
  set_target_properties(${target} PROPERTIES EXPORT_NAME "${name}")
endforeach()
install(TARGETS lockstep ${LOCKSTEP_MODULES} EXPORT LockstepTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT LockstepTargets NAMESPACE Lockstep:: DESTINATION "${config_folder}")
install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/lockstep"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.h")

get_property(programs DIRECTORY "${PROJECT_SOURCE_DIR}/programs" PROPERTY BUILDSYSTEM_TARGETS)
foreach(target IN LISTS programs)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    install(TARGETS ${target} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endif()
endforeach()

install(
  FILES "${PROJECT_SOURCE_DIR}/programs/completion/lockstep.bash"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions"
  RENAME lockstep)
install(FILES "${PROJECT_SOURCE_DIR}/programs/man/lockstep.1" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/LockstepConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/LockstepConfig.cmake" INSTALL_DESTINATION "${config_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/LockstepConfig.cmake" "${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/LockstepTorch.cmake" "${PROJECT_SOURCE_DIR}/cmake/LockstepSodium.cmake"
  DESTINATION "${config_folder}")
