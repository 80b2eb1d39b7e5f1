# Tests that QEMU's emulation of user programs cannot run, with what it lacks; a 64-bit ARM machine runs
# them all. What a kernel does for programs is emulated call by call, and advice about memory that the
# emulation does not know it takes for done.

# MADV_POPULATE_WRITE, MADV_DONTFORK, MADV_DONTDUMP and MADV_DONTNEED are ignored.
list(APPEND REFIT_NOT_EMULATED touch slab_pins host_arena host_device huge_pages)

# A child that has several of its parent's locks, threads or guard pages meets those of the emulation: a
# process that is forked beside other threads ends in an assertion of QEMU's.
list(APPEND REFIT_NOT_EMULATED channel zap_fork machine_lock secret strangers)

# /proc/PID/exe and /proc/PID/mem of a process are QEMU's own.
list(APPEND REFIT_NOT_EMULATED segments)

# They start the program again, or another one, which the kernel takes for one of another machine.
list(APPEND REFIT_NOT_EMULATED fake_ipc cuda_share ranks gpu_processes workers_lost trainers_lost)
