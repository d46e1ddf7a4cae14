"""The Python side of the C++ ops: the call, fake kernels, second derivatives, numerics settings."""
