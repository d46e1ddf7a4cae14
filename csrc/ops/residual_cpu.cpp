#include "ops/torch.h"

#include "kernels/cpu/residual.h"
#include "ops/residual.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

void run_fwd(ResidualFwd a, const RowCall& call) {
  a.dropout = with_state(a.dropout, call.state(a.dropout));
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { residual_fwd_rows(a, begin, end); });
}

void run_bwd(ResidualBwd a, const RowCall& call) {
  a.dropout = with_state(a.dropout, call.state(a.dropout));
  parallel_rows_with_grads(call, a.cols, a.cols,
                           [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
                             residual_bwd_rows(a, begin, end, dweight, dbias);
                           });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("residual_fwd", &residual_fwd<run_fwd>);
  m.impl("residual_bwd", &residual_bwd<run_bwd>);
}

}  // namespace ckptfused
