#include "ops/torch.h"

#include "kernels/cuda/activation.h"
#include "ops/activation.h"
#include "ops/launch_cuda.h"

namespace ckptfused {
namespace {

void run_fwd(ActivationFwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(activation_fwd_cuda(a, call.state(a.dropout), call.rows, cuda.stream()));
}

void run_bwd(ActivationBwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(activation_bwd_cuda(a, call.state(a.dropout), call.rows, cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("activation_fwd", &activation_fwd<run_fwd>);
  m.impl("activation_bwd", &activation_bwd<run_bwd>);
}

}  // namespace ckptfused
