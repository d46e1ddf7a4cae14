#include "ops/torch.h"

#include "kernels/cpu/qk.h"
#include "ops/qk.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

void run_fwd(const QkPartList<QkFwd>& parts) {
  for (const auto& part : parts) {
    const QkFwd& a = part.heads;
    parallel_rows(part.call.rows, a.heads * a.head_dim,
                  [&](int64_t begin, int64_t end) { qk_fwd_rows(a, begin, end); });
  }
}

void run_bwd(const QkPartList<QkBwd>& parts) {
  for (const auto& part : parts) {
    const QkBwd& a = part.heads;
    parallel_rows_with_grads(part.call, a.head_dim, a.heads * a.head_dim,
                             [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
                               qk_bwd_rows(a, begin, end, dweight, dbias);
                             });
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("qk_fwd", &qk_fwd<run_fwd>);
  m.impl("qk_bwd", &qk_bwd<run_bwd>);
}

}  // namespace ckptfused
