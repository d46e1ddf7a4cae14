#include "kernels/cpu/residual.h"

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/residual.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {
namespace {

size_t scratch_bytes(int64_t cols) {
  return 6 * RowScratch::size<double>(cols) + RowScratch::size<uint16_t>(dropout_buffer_size(cols));
}

}  // namespace

bool residual_fwd_rows(const ResidualFwd& a, int64_t begin, int64_t end) {
  RowScratch scratch(scratch_bytes(a.cols));
  return CKPT_DISPATCH(residual_fwd)(a, begin, end, scratch);
}

bool residual_bwd_rows(const ResidualBwd& a, int64_t begin, int64_t end, void* dweight,
                       void* dbias) {
  RowScratch scratch(scratch_bytes(a.cols));
  return CKPT_DISPATCH(residual_bwd)(a, begin, end, dweight, dbias, scratch);
}

}  // namespace ckptfused
