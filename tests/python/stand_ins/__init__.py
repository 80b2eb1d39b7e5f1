"""Frameworks that cannot be installed on a machine without a GPU, as far as refit touches them.

Each file names the framework and the source that it follows. They have the interfaces and the order
of calls; no code of those projects is in them.
"""
