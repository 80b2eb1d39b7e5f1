"""Saved tensors leave in the forward pass and return in the backward pass."""
