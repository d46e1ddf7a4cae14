#include "ops/torch.h"

#include "kernels/cuda/norm.h"
#include "kernels/cuda/residual.h"
#include "ops/launch_cuda.h"
#include "ops/residual.h"

namespace ckptfused {
namespace {

// An addition a row would be fourteen instructions of a kernel that has none to spare, for what no
// block asks of a GPU.
void check_rows(const RowMap& map, const Dropout& dropout, const RowCall& call) {
  TORCH_CHECK(map.first == 0 || !dropout.active(), call.op,
              ": rows: expected [] or [B, T] for dropout on a GPU, got a first row");
}

void run_fwd(ResidualFwd a, const RowCall& call) {
  check_rows(a.row_map, a.dropout, call);
  const CudaLaunch cuda(call);
  cuda.check(residual_fwd_cuda(a, call.state(a.dropout), call.rows, cuda.multiprocessors(),
                               cuda.stream()));
}

void run_bwd(ResidualBwd a, const RowCall& call) {
  check_rows(a.row_map, a.dropout, call);
  const CudaLaunch cuda(call);
  const int64_t chunks = call.chunks(row_grad_chunks(call.rows, a.cols, cuda.multiprocessors()));
  cuda.check(residual_bwd_cuda(a, call.state(a.dropout), call.rows, chunks,
                               mutable_data(call.dweight), mutable_data(call.dbias),
                               cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("residual_fwd", &residual_fwd<run_fwd>);
  m.impl("residual_bwd", &residual_bwd<run_bwd>);
}

}  // namespace ckptfused
