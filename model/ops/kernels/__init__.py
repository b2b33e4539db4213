"""Triton kernels of the served operations (`<name>`), and plain functions over torch tensors that launch them (`<name>_ops`)."""
