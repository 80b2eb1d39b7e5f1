# Included by zig-x86_64.cmake and zig-aarch64.cmake: compiles with the clang of the package ziglang from PyPI,
# which has the headers and stubs of every glibc for both machines, against glibc 2.28, and for the oldest
# processor of the kind. ZIG, or else the ziglang of this environment's Python, is the program.
if(NOT DEFINED ENV{ZIG})
  foreach(python "${Python_EXECUTABLE}" python3 python)
    if(python)
      execute_process(COMMAND ${python} -c "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'), end='')"
        OUTPUT_VARIABLE zig ERROR_QUIET)
      if(zig)
        set(ENV{ZIG} ${zig}) # for the projects that CMake tries the compiler with
        break()
      endif()
    endif()
  endforeach()
endif()
if(NOT DEFINED ENV{ZIG})
  message(FATAL_ERROR "No Python here has ziglang: pip install ziglang, or name the zig program in ZIG")
endif()
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${machine})
set(CMAKE_C_COMPILER $ENV{ZIG} cc -target ${machine}-linux-gnu.2.28)
set(CMAKE_CXX_COMPILER $ENV{ZIG} c++ -target ${machine}-linux-gnu.2.28)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER_TARGET "") # it is in the command already
  set(CMAKE_${language}_ARCHIVE_CREATE "\"$ENV{ZIG}\" ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "\"$ENV{ZIG}\" ranlib <TARGET>")
endforeach()
# This machine's strip and libraries are for this machine.
set(CMAKE_STRIP "" CACHE FILEPATH "")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-s -pie -Wl,--gc-sections")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s -Wl,--gc-sections")
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
