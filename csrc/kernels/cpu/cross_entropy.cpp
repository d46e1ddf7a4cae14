#include "kernels/cpu/cross_entropy.h"

#include <cmath>

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/cross_entropy.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

void cross_entropy_fwd_rows(const CrossEntropyFwd& a, int64_t begin, int64_t end) {
  CKPT_DISPATCH(cross_entropy_fwd)(a, begin, end);
}

void cross_entropy_bwd_rows(const CrossEntropyBwd& a, int64_t begin, int64_t end) {
  CKPT_DISPATCH(cross_entropy_bwd)(a, begin, end);
}

}  // namespace ckptfused
