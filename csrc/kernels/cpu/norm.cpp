#include "kernels/cpu/norm.h"

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/norm.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

bool norm_fwd_rows(const NormFwd& a, int64_t begin, int64_t end) {
  RowScratch scratch(3 * RowScratch::size<double>(a.cols));
  return CKPT_DISPATCH(norm_fwd)(a, begin, end, scratch);
}

bool norm_bwd_rows(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  RowScratch scratch(3 * RowScratch::size<double>(a.cols));
  return CKPT_DISPATCH(norm_bwd)(a, begin, end, dweight, dbias, scratch);
}

void sum_grads_cols(const GradSum& s, DType acc, int64_t begin, int64_t end) {
  CKPT_DISPATCH(sum_grads)(s, acc, begin, end);
}

}  // namespace ckptfused
