#include "ops/torch.h"

#include "kernels/cuda/qk.h"
#include "ops/launch_cuda.h"
#include "ops/qk.h"

namespace ckptfused {
namespace {

void run_fwd(QkFwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  cuda.check(qk_fwd_cuda(a, call.rows, cuda.stream()));
}

void run_bwd(QkBwd a, const RowCall& call) {
  const CudaLaunch cuda(call);
  const int64_t chunks = qk_grad_chunks(call.rows, a.heads, a.head_dim, cuda.multiprocessors());
  const GradPartials partials(call, chunks, a.head_dim);
  cuda.check(qk_bwd_cuda(a, call.rows, chunks, partials.dweight, partials.dbias,
                         mutable_data(call.dweight), mutable_data(call.dbias), cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("qk_fwd", &qk_fwd<run_fwd>);
  m.impl("qk_bwd", &qk_bwd<run_bwd>);
}

}  // namespace ckptfused
