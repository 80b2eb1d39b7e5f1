# For 64-bit ARM from a Debian machine of another kind: its cross compiler, its libraries of the foreign
# architecture (dpkg --add-architecture arm64), and QEMU, which runs what is built. The preset "aarch64"
# builds with it.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

# pkg-config knows only the foreign libraries. They lie beside the machine's own: Debian names the
# folders after the architecture.
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)

# tests/CMakeLists.txt runs tests by it.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
