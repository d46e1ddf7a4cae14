#include "ops/torch.h"

#include "kernels/cuda/cross_entropy.h"
#include "ops/cross_entropy.h"
#include "ops/launch_cuda.h"

namespace ckptfused {
namespace {

void run_fwd(CrossEntropyFwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(cross_entropy_fwd_cuda(a, call.rows, cuda.stream()));
}

void run_bwd(CrossEntropyBwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(cross_entropy_bwd_cuda(a, call.rows, cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("cross_entropy_fwd", &cross_entropy_fwd<run_fwd>);
  m.impl("cross_entropy_bwd", &cross_entropy_bwd<run_bwd>);
}

}  // namespace ckptfused
