"""Kernels of other libraries, brought to the contract of this package: one a file."""
