#include "kernels/cpu/qk.h"

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/qk.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

void qk_fwd_rows(const QkFwd& a, int64_t begin, int64_t end) {
  RowScratch scratch(3 * RowScratch::size<double>(a.head_dim));
  CKPT_DISPATCH(qk_fwd)(a, begin, end, scratch);
}

void qk_bwd_rows(const QkBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias) {
  RowScratch scratch(4 * RowScratch::size<double>(a.head_dim));
  CKPT_DISPATCH(qk_bwd)(a, begin, end, dweight, dbias, scratch);
}

}  // namespace ckptfused
