"""Optimizer states and gradients leave the device and return: the cycle."""
