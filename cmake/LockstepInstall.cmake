# Rules for cmake --install: programs in bin, modules in lib, headers in include/lockstep, the completion for bash, and
# the files for find_package(Lockstep).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
foreach(target IN LISTS LOCKSTEP_MODULES)
  string(REGEX REPLACE "^lockstep_" "" name "${target}")
  set_target_properties(${target} PROPERTIES EXPORT_NAME "${name}")
endforeach()
write_basic_package_version_file("${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)

# lockstep_install_sdk(<export> <prefix> <lib> <include> [<argument of install>...]) installs the modules and headers in
# these folders below <prefix>, a folder of the installation, and in <lib>/cmake/Lockstep the files for find_package().
# LOCKSTEP_IN_WHEEL: whether the libraries that the modules need are beside them.
function(lockstep_install_sdk export prefix lib include)
  set(config "${prefix}${lib}/cmake/Lockstep")
  install(TARGETS lockstep ${LOCKSTEP_MODULES} EXPORT ${export}
          ARCHIVE DESTINATION "${prefix}${lib}" ${ARGN}
          INCLUDES DESTINATION "${prefix}${include}")
  install(EXPORT ${export} NAMESPACE Lockstep:: FILE LockstepTargets.cmake DESTINATION "${config}" ${ARGN})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/lockstep" DESTINATION "${prefix}${include}" ${ARGN}
          FILES_MATCHING PATTERN "*.h")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/LockstepConfig.cmake.in"
    "${PROJECT_BINARY_DIR}/${export}/LockstepConfig.cmake" INSTALL_DESTINATION "${config}")
  install(FILES "${PROJECT_BINARY_DIR}/${export}/LockstepConfig.cmake"
    "${PROJECT_BINARY_DIR}/LockstepConfigVersion.cmake" "${PROJECT_SOURCE_DIR}/cmake/LockstepTorch.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/LockstepSodium.cmake" DESTINATION "${config}" ${ARGN})
endfunction()

# lockstep_install_data(<share> <man> [<argument of install>...]) installs the completion, the man page, and the
# baselines that lockstep bench starts.
function(lockstep_install_data share man)
  install(FILES "${PROJECT_SOURCE_DIR}/programs/completion/lockstep.bash"
          DESTINATION "${share}/bash-completion/completions" ${ARGN} RENAME lockstep)
  install(FILES "${PROJECT_SOURCE_DIR}/programs/man/lockstep.1" DESTINATION "${man}/man1" ${ARGN})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/bench/baselines" DESTINATION "${share}/lockstep/bench" ${ARGN}
          PATTERN "__pycache__" EXCLUDE)
endfunction()

get_property(programs DIRECTORY "${PROJECT_SOURCE_DIR}/programs" PROPERTY BUILDSYSTEM_TARGETS)
foreach(target IN LISTS programs)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)
    install(TARGETS ${target} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
  endif()
endforeach()
lockstep_install_data("${CMAKE_INSTALL_DATADIR}" "${CMAKE_INSTALL_MANDIR}")
lockstep_install_hook(lib/lockstep)
set(LOCKSTEP_IN_WHEEL no)
lockstep_install_sdk(LockstepTargets "" "${CMAKE_INSTALL_LIBDIR}" "${CMAKE_INSTALL_INCLUDEDIR}")
