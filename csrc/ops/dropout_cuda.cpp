#include "ops/torch.h"

#include "kernels/cuda/dropout.h"
#include "ops/dropout.h"
#include "ops/launch_cuda.h"

namespace ckptfused {
namespace {

void run(Dropout dropout, int64_t cols, bool* keep, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(dropout_mask_cuda(dropout, call.state(dropout), call.rows, cols, keep, cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("dropout_mask", &dropout_mask<run>);
}

}  // namespace ckptfused
