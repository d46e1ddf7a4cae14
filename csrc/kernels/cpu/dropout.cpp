#include "kernels/cpu/dropout.h"

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/dropout.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

void dropout_mask_rows(const Dropout& dropout, int64_t cols, int64_t begin, int64_t end,
                       bool* keep) {
  RowScratch scratch(RowScratch::size<uint16_t>(dropout_buffer_size(cols)));
  CKPT_DISPATCH(dropout_mask)(dropout, cols, begin, end, keep, scratch);
}

}  // namespace ckptfused
