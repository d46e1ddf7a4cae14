#include "ops/torch.h"

#include "kernels/cuda/norm.h"
#include "ops/launch_cuda.h"
#include "ops/norm.h"

namespace ckptfused {
namespace {

void run_fwd(NormFwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(norm_fwd_cuda(a, call.rows, cuda.multiprocessors(), cuda.stream()));
}

void run_bwd(NormBwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  const int64_t chunks = call.chunks(row_grad_chunks(call.rows, a.cols, cuda.multiprocessors()));
  cuda.check(norm_bwd_cuda(a, call.rows, chunks, mutable_data(call.dweight),
                           mutable_data(call.dbias), cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("norm_fwd", &norm_fwd<run_fwd>);
  m.impl("norm_bwd", &norm_bwd<run_bwd>);
}

}  // namespace ckptfused
