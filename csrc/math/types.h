#pragma once

#include <cstdint>

#include "math/instructions.h"

namespace ckptfused {

enum class DType : int { f64, f32, bf16, f16 };

// Storage-only 16-bit types: arithmetic happens in the accumulation type.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The type that norms, softmax and reductions accumulate in.
template <typename T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccOf<T>::type;

CKPT_HD double to_acc(double x) {
  return x;
}
CKPT_HD float to_acc(float x) {
  return x;
}
CKPT_HD float to_acc(bf16 x) {
  return bits_to_float(uint32_t(x.bits) << 16);
}
CKPT_HD float to_acc(f16 x) {
  return cvt_f32_f16(x.bits);
}

// Round to nearest, ties to even.
CKPT_HD void from_acc(double x, double& y) {
  y = x;
}
CKPT_HD void from_acc(float x, float& y) {
  y = x;
}
CKPT_HD void from_acc(double x, float& y) {
  y = float(x);
}
CKPT_HD void from_acc(float x, double& y) {
  y = x;
}
CKPT_HD void from_acc(float x, bf16& y) {
  y.bits = cvt_rn_bf16_f32(x);
}
CKPT_HD void from_acc(float x, f16& y) {
  y.bits = cvt_rn_f16_f32(x);
}

// The value that a store and a load of T give back.
template <typename T>
CKPT_HD acc_t<T> round_to(acc_t<T> x) {
  T y;
  from_acc(x, y);
  return to_acc(y);
}

}  // namespace ckptfused
