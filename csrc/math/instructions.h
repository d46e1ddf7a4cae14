#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "math/macros.h"

// The device's instructions that no C++ expression says, by name, and beside each what it does in
// software. The host takes that: for what it computes itself, and in the tests that run a kernel's
// device branches there.

namespace ckptfused {

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

// Half precision, as bits, to float: exact.
CKPT_HD float cvt_f32_f16(uint16_t x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  // Shift the fields into place and rebias the exponent by an addition to the bits. A subnormal
  // gets 2^-14 in front of its fraction, and a subtraction takes that away again: exact, and no
  // float subnormal on the way, which a thread that flushes those would lose.
  const uint32_t magnitude = uint32_t(x & 0x7fffu) << 13;
  const uint32_t normal = magnitude + 0x38000000u;
  const float subnormal = bits_to_float(magnitude + 0x38800000u) - bits_to_float(0x38800000u);
  const uint32_t finite = magnitude < 0x00800000u ? float_to_bits(subnormal) : normal;
  const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
  return bits_to_float(bits | (uint32_t(x & 0x8000u) << 16));
#endif
}

// Float to half precision and to bfloat16, as bits: to nearest, ties to even, as PyTorch does. NaN
// stays NaN (of other bits on device: 0x7fff).
CKPT_HD uint16_t cvt_rn_f16_f32(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const uint32_t u = float_to_bits(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  const uint32_t normal = (a + 0xc8000fffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t subnormal = float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000u;
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = a < 0x38800000u ? subnormal : normal;
  return uint16_t(sign | (a >= 0x477ff000u ? special : finite));
#endif
}
// The bits of the bfloat16 in the upper half; the lower one means nothing.
CKPT_HD uint32_t rounded_to_bf16(float x) {
  const uint32_t u = float_to_bits(x);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded;
}
CKPT_HD uint16_t cvt_rn_bf16_f32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  return uint16_t(rounded_to_bf16(x) >> 16);
#endif
}

// Subnormals become 0, of the same sign: ".ftz".
CKPT_HD float flushed(float x) {
  return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}

// 2^x and 1/x within 2 and 1 ulps, with neither subnormal arguments nor results.
CKPT_HD float ex2_approx_ftz(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return flushed(std::exp2(flushed(x)));
#endif
}
CKPT_HD float rcp_approx_ftz(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return flushed(1.0f / flushed(x));
#endif
}

// A sum and products that the compiler does not contract with one another.
CKPT_HD float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
CKPT_HD float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
CKPT_HD double mul_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// 1 / sqrt(x), within 2 ulps in single precision: the quotient takes some twenty instructions.
template <typename A>
CKPT_HD A rsqrt_approx(A x) {
#if defined(__CUDA_ARCH__)
  return ::rsqrt(x);
#else
  return A(1) / std::sqrt(x);
#endif
}

// Brings what lies at an address of global memory into the second-level cache.
CKPT_HD void prefetch_global_l2(const void* at) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#else
  (void)at;
#endif
}

// Stores 16 bytes at once, at a multiple of 16. (Of a store through a union of types nvcc makes
// four sometimes.)
CKPT_HD void st_global_v4(void* to, const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3]));
#else
  memcpy(to, word, 16);
#endif
}

}  // namespace ckptfused
