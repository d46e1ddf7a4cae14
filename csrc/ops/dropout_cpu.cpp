#include "ops/torch.h"

#include "kernels/cpu/dropout.h"
#include "ops/dropout.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

void run(Dropout dropout, int64_t cols, bool* keep, const RowCall& call) {
  dropout = with_state(dropout, call.state(dropout));
  parallel_rows(call.rows, cols, [&](int64_t begin, int64_t end) {
    dropout_mask_rows(dropout, cols, begin, end, keep + begin * cols);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("dropout_mask", &dropout_mask<run>);
}

}  // namespace ckptfused
