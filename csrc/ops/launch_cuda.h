#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/row_args.h"

// How ops on rows launch kernels on a GPU. Only *_cuda.cpp files include this: it needs the CUDA
// toolkit's headers. Nothing here, nor in those files, waits for the GPU or reads its memory, so
// that a block can be captured in a CUDA graph.

namespace ckptfused {

// While one lives, the device of the call is the current one.
class CudaLaunch {
 public:
  explicit CudaLaunch(const RowCall& call);

  void* stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
  int multiprocessors() const;
  // Raises unless status, what a launcher returned, is null.
  void check(const char* status) const;

 private:
  const char* op_;
  c10::cuda::OptionalCUDAGuard guard_;
};

}  // namespace ckptfused
