#include "kernels/cpu/activation.h"

#include <algorithm>

#include "kernels/cpu/rows.h"

#define CKPT_KERNEL_FILE "kernels/cpu/activation.inl"
#include "kernels/cpu/foreach_target.h"

namespace ckptfused {

void activation_fwd_rows(const ActivationFwd& a, int64_t begin, int64_t end) {
  CKPT_DISPATCH(activation_fwd)(a, begin, end);
}

void activation_bwd_rows(const ActivationBwd& a, int64_t begin, int64_t end) {
  CKPT_DISPATCH(activation_bwd)(a, begin, end);
}

}  // namespace ckptfused
