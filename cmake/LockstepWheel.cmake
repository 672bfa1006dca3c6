# The files of the wheel: the component `wheel`, whose prefix is Python's site-packages. scikit-build-core
# (pyproject.toml) builds the target `wheel`, installs this component, and adds the Python files itself.
#
#   lockstep/_torch_2_N            the extension for this minor version of torch, and those in LOCKSTEP_EXTENSIONS
#   _lockstep_hook, lockstep_hook.pth   the watch of programs with torch.distributed
#   lockstep/sdk/                  for find_package(Lockstep): headers, modules, the static libraries that they need;
#                                  scripts/split_sdk.py makes another wheel of it and of lockstep-bench
#   lockstep/_source.tar.gz        the source distribution, if LOCKSTEP_SOURCE names it
#   lockstep/licences/             of the libraries that are linked
#   the scripts folder             the programs; they find the libtorch in site-packages beside them
#   the data folder                what lockstep bench reads, the completion and the man page
#
# JPEG and MPI are never part of it: the SDK reads no JPEG images, and libmpi is loaded when it is used.
if(NOT LOCKSTEP_PYTHON)
  message(FATAL_ERROR "the wheel needs the headers of the Python that has this torch (Debian: python3-dev)")
endif()
set(in_wheel COMPONENT wheel EXCLUDE_FROM_ALL)

# Programs. Those that link libtorch are linked a second time, because they search it in another folder.
set(site_packages "python${LOCKSTEP_PYTHON_VERSION}/site-packages")
foreach(program bench probe)
  get_target_property(sources lockstep_${program}_program SOURCES)
  list(TRANSFORM sources PREPEND "${PROJECT_SOURCE_DIR}/programs/")
  get_target_property(libraries lockstep_${program}_program LINK_LIBRARIES)
  lockstep_executable(lockstep_${program}_in_wheel SOURCES ${sources} LINK ${libraries})
  set_target_properties(
    lockstep_${program}_in_wheel
    PROPERTIES OUTPUT_NAME "lockstep-${program}" RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/wheel/bin"
               EXCLUDE_FROM_ALL ON INSTALL_RPATH "$ORIGIN/../lib/${site_packages}/torch/lib")
endforeach()
install(TARGETS lockstep_program lockstep_bench_in_wheel lockstep_probe_in_wheel
        RUNTIME DESTINATION "${SKBUILD_SCRIPTS_DIR}" ${in_wheel})
lockstep_install_data("${SKBUILD_DATA_DIR}/share" "${SKBUILD_DATA_DIR}/share/man" ${in_wheel})

# The package.
if(LOCKSTEP_EXTENSIONS)  # those that scripts/wheels.sh has built, in the folder lockstep of this one
  install(DIRECTORY "${LOCKSTEP_EXTENSIONS}/lockstep" DESTINATION . ${in_wheel})
endif()
if(LOCKSTEP_SOURCE)  # the source distribution, for `lockstep build`
  install(FILES "${LOCKSTEP_SOURCE}" DESTINATION lockstep ${in_wheel} RENAME _source.tar.gz)
endif()
install(FILES "${PROJECT_BINARY_DIR}/python/lockstep/_build.py" DESTINATION lockstep ${in_wheel})
install(FILES "${PROJECT_SOURCE_DIR}/python/_lockstep_backend.py" DESTINATION . ${in_wheel})  # of the entry points
lockstep_install_hook(. ${in_wheel})
install(FILES "${PROJECT_SOURCE_DIR}/python/hook/lockstep_hook.pth" DESTINATION . ${in_wheel})

# The SDK.
add_library(lockstep_no_jpeg STATIC EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/lockstep/data/jpeg/no_jpeg.cc")
target_link_libraries(lockstep_no_jpeg PRIVATE lockstep_base)
find_library(LOCKSTEP_ZLIB_STATIC_LIBRARY NAMES libz.a REQUIRED)
set(LOCKSTEP_IN_WHEEL yes)
lockstep_install_sdk(LockstepWheelTargets lockstep/sdk/ lib include ${in_wheel})
install(TARGETS lockstep_no_jpeg ARCHIVE DESTINATION lockstep/sdk/lib ${in_wheel})
install(FILES "${LOCKSTEP_ZLIB_STATIC_LIBRARY}" "${LOCKSTEP_SODIUM_LIBRARY}" DESTINATION lockstep/sdk/lib ${in_wheel})
# Debian's and Ubuntu's files of the licences of what the libraries and programs contain.
foreach(package libsodium-dev zlib1g-dev nlohmann-json3-dev libcli11-dev libxxhash-dev)
  find_file(LOCKSTEP_LICENCE_OF_${package} ${package}/copyright PATHS "${deps}/usr/share/doc" /usr/share/doc)
  install(FILES "${LOCKSTEP_LICENCE_OF_${package}}" DESTINATION lockstep/licences ${in_wheel}
          OPTIONAL RENAME ${package}.txt)
endforeach()

add_custom_target(wheel DEPENDS lockstep ${LOCKSTEP_MODULES} lockstep_program lockstep_bench_in_wheel
                  lockstep_probe_in_wheel lockstep_python lockstep_no_jpeg lockstep_watch)
