#include "ops/torch.h"

#include "kernels/cpu/cross_entropy.h"
#include "ops/cross_entropy.h"
#include "ops/rows_cpu.h"

namespace ckptfused {
namespace {

// The kernels read what belongs to a target without looking.
void check_targets(const char* op, const CrossEntropyShape& a, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = a.target[row];
    TORCH_CHECK_INDEX(target == a.ignore_index || (0 <= target && target < a.classes), op,
                      ": target: expected a class, 0 to ", a.classes - 1, ", or ignore_index (",
                      a.ignore_index, "), got ", target, " in row ", row);
  }
}

void run_fwd(CrossEntropyFwd a, const RowCall& call) {
  check_targets(call.op, a, call.rows);
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { cross_entropy_fwd_rows(a, begin, end); });
}

void run_bwd(CrossEntropyBwd a, const RowCall& call) {
  check_targets(call.op, a, call.rows);
  parallel_rows(call.rows, a.cols,
                [&](int64_t begin, int64_t end) { cross_entropy_bwd_rows(a, begin, end); });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("cross_entropy_fwd", &cross_entropy_fwd<run_fwd>);
  m.impl("cross_entropy_bwd", &cross_entropy_bwd<run_bwd>);
}

}  // namespace ckptfused
