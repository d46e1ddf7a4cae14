#pragma once

// Rows of operands (operands.h), for every instruction set.

#include <type_traits>

#include "kernels/cpu/operands.h"
#include "kernels/cpu/rows.h"

namespace ckptfused {

template <typename C, typename T>
CKPT_HD C converted(T x) {
  if constexpr (std::is_same_v<C, T>) {
    return x;
  } else {
    C y;
    from_acc(to_acc(x), y);
    return y;
  }
}

// Two entries of a 16-bit right operand that lie side by side, in its memory.
typedef uint32_t __attribute__((may_alias)) Pair;
CKPT_HD uint32_t pair_of(bf16 low, bf16 high) {
  return uint32_t(low.bits) | uint32_t(high.bits) << 16;
}
CKPT_HD uint32_t pair_of(float low, float high) {
  return rounded_to_bf16(low) >> 16 | (rounded_to_bf16(high) & 0xffff0000u);
}

// out = n entries of two rows, interleaved; high is null where there is no second row.
template <typename T>
CKPT_HD void interleave_rows(const T* low, const T* high, int64_t n, Pair* out) {
  if (high == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = pair_of(low[i], T{});
    return;
  }
  CKPT_IVDEP
  for (int64_t i = 0; i < n; ++i) out[i] = pair_of(low[i], high[i]);
}

}  // namespace ckptfused
