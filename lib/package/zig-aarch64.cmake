# For aarch64 Linux with glibc 2.28 or later; see zig.cmake.
set(machine aarch64)
include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
