#include "ops/torch.h"

#include "kernels/cpu/norm.h"
#include "kernels/cpu/rows.h"
#include "ops/parallel_cpu.h"
#include "ops/sum_grads.h"

namespace ckptfused {
namespace {

void run(const std::vector<GradSum>& sums, DType acc, const RowCall&) {
  for (const GradSum& sum : sums) {
    parallel_for(0, sum.cols, 512,
                 [&](int64_t begin, int64_t end) { sum_grads_cols(sum, acc, begin, end); });
  }
}

int64_t grad_chunks(const at::Tensor&, int64_t rows, int64_t, int64_t) {
  return cpu_grad_chunks(rows);
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("sum_grads", &sum_grads<run>);
  m.impl("grad_chunks", &grad_chunks);
}

}  // namespace ckptfused
