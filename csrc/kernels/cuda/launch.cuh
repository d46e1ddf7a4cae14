#pragma once

#include <cstdint>

// The one way to launch a kernel. nvcc takes the definition below; the host-run tests compile the
// same .cu files with g++ and take the one in tests/host_cuda.h.

#if defined(__CUDACC__)

#include <cuda_runtime.h>

namespace ckptfused {

// Returns null, or what went wrong.
template <typename... Params, typename... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, dim3 block, void* stream, Args... args) {
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(args...);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace ckptfused

#else

#include "tests/host_cuda.h"

#endif

namespace ckptfused {

// A row of blocks. launch() refuses the empty grid that too many become.
inline dim3 grid_of(int64_t blocks) {
  return dim3(blocks <= 0x7fffffff ? unsigned(blocks) : 0u);
}

}  // namespace ckptfused
