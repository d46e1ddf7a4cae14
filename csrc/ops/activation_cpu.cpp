#include "ops/torch.h"

#include "kernels/cpu/activation.h"
#include "ops/activation.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

void run_fwd(ActivationFwd a, const RowCall& call) {
  a.dropout = with_state(a.dropout, call.state(a.dropout));
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { activation_fwd_rows(a, begin, end); });
}

void run_bwd(ActivationBwd a, const RowCall& call) {
  a.dropout = with_state(a.dropout, call.state(a.dropout));
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { activation_bwd_rows(a, begin, end); });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("activation_fwd", &activation_fwd<run_fwd>);
  m.impl("activation_bwd", &activation_bwd<run_bwd>);
}

}  // namespace ckptfused
