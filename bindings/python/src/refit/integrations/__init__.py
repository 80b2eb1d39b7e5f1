"""refit inside the frameworks that people train with: one thin module for each.

A module here translates a framework's moments and names into those of ``refit`` and does nothing
else; it imports its framework, so import it only where that is installed. None of them is imported
by ``import refit``.
"""
