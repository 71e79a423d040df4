"""The Triton kernels of a GPU."""
