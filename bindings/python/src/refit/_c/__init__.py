"""The C library: its functions as ctypes sees them, handles, configuration and statistics."""
