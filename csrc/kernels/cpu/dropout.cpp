#include "kernels/cpu/dropout.h"

#include <vector>

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/dropout.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

void dropout_mask_rows(const Dropout& dropout, int64_t cols, int64_t begin, int64_t end,
                       bool* keep) {
  std::vector<uint16_t> buffer(size_t(dropout_buffer_size(cols)));
  for (int64_t row = begin; row < end; ++row, keep += cols) {
    CKPT_DISPATCH(dropout_mask)(dropout, row, 0, cols, buffer.data(), keep);
  }
}

}  // namespace ckptfused
