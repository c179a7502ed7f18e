# Cross compilation for aarch64 on Debian, with the packages that
# deploy/cross/make_root has unpacked: `cmake --preset aarch64`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(QUANTD_AARCH64_ROOT ${CMAKE_CURRENT_LIST_DIR}/../../build/aarch64-root
    CACHE PATH "What deploy/cross/make_root has made")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES QUANTD_AARCH64_ROOT)
get_filename_component(CMAKE_SYSROOT ${QUANTD_AARCH64_ROOT} ABSOLUTE)
if(NOT EXISTS ${CMAKE_SYSROOT}/usr)
  message(FATAL_ERROR "There is no ${CMAKE_SYSROOT}. To make it, run "
                      "deploy/cross/make_root ${CMAKE_SYSROOT}")
endif()
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
# Programs that the build runs, such as protoc, are those of this machine.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${CMAKE_SYSROOT})
set(ENV{PKG_CONFIG_LIBDIR}
    ${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${CMAKE_SYSROOT}/usr/share/pkgconfig)

# Tests run under emulation.
find_program(QUANTD_QEMU_AARCH64 qemu-aarch64-static)
if(QUANTD_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QUANTD_QEMU_AARCH64} -L ${CMAKE_SYSROOT})
endif()
