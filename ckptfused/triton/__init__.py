"""Kernels in Triton for CUDA tensors, under the names of the ops. Importing this imports no triton."""
