#pragma once

#include <cstdint>
#include <cstring>

#include "math/macros.h"

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

CKPT_HD float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}
CKPT_HD uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

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
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  // Shift the fields into place and rebias the exponent by an addition to the bits. A subnormal
  // gets 2^-14 in front of its fraction, and a subtraction takes that away again: exact, and no
  // float subnormal on the way, which a thread that flushes those would lose.
  const uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
  const uint32_t normal = magnitude + 0x38000000u;
  const float subnormal = bits_to_float(magnitude + 0x38800000u) - bits_to_float(0x38800000u);
  const uint32_t finite = magnitude < 0x00800000u ? float_to_bits(subnormal) : normal;
  const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return bits_to_float(bits | (uint32_t(x.bits & 0x8000u) << 16));
#endif
}

// Round to nearest, ties to even, as PyTorch does. NaN stays NaN (of other bits on device: 0x7fff).
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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t u = float_to_bits(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  y.bits = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
#endif
}
CKPT_HD void from_acc(float x, f16& y) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t u = float_to_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t subnormal = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = a < 0x38800000u ? subnormal : normal;
  y.bits = uint16_t(sign | (a >= 0x477ff000u ? special : finite));
#endif
}

// The value that a store and a load of T give back.
template <typename T>
CKPT_HD acc_t<T> round_to(acc_t<T> x) {
  T y;
  from_acc(x, y);
  return to_acc(y);
}

}  // namespace ckptfused
