"""Which refit this is; the C library that is opened must be the same."""

__version__ = "0.1.0"
