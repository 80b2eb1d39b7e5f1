"""Frameworks that cannot be installed on a machine without a GPU, as far as refit touches them.

Each file says what it stands for and which source it was drawn after. They hold the shapes of
interfaces and the order of calls, written anew; no code of those projects is in them.
"""
