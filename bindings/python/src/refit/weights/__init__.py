"""Weights on their way from a trainer to workers and into engines, and as files."""
