#include "ops/torch.h"

#include "kernels/cpu/norm.h"
#include "ops/norm.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

void run_fwd(NormFwd a, const RowCall& call) {
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { norm_fwd_rows(a, begin, end); });
}

void run_bwd(NormBwd a, const RowCall& call) {
  parallel_rows_with_grads(call, a.cols, a.cols,
                           [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
                             norm_bwd_rows(a, begin, end, dweight, dbias);
                           });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("norm_fwd", &norm_fwd<run_fwd>);
  m.impl("norm_bwd", &norm_bwd<run_bwd>);
}

}  // namespace ckptfused
