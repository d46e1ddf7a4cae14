#pragma once

#include <cmath>

#include "math/types.h"

namespace ckptfused {

// Branch-free float functions: the host compiler vectorises loops over them. Doubles take the
// standard library's. Errors stated are against double precision over the whole range. On device
// the CUDA library's functions, built on the hardware's 2^x, take a third of the instructions;
// NVIDIA gives 2 ulps for each of those used here.

// exp: 2^n * e^r with |r| <= ln2/2 and a degree-6 polynomial; error below 1.1 ulp. 0 below -87.33,
// where results would be subnormal (a slow multiplication); infinity from 88.73 on by itself.
CKPT_HD float exp_acc(float x) {
#if CKPT_DEVICE
  return ::expf(x);
#else
  const float hi = x > 89.0f ? 89.0f : x;
  const float clamped = hi < -87.33654f ? -87.33654f : hi;
  const float shifted = clamped * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693145751953125f) - n * 1.42860682e-6f;
  float q = 1.9875691500e-4f;
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  const float e = (q * r) * r + r + 1.0f;
  // 2^n in two factors, so that n = 128 does not overflow on the way.
  const int32_t exponent = int32_t(float_to_bits(shifted)) - 0x4b400000;
  const int32_t half = exponent >> 1;
  const float scale0 = bits_to_float(uint32_t(half + 127) << 23);
  const float scale1 = bits_to_float(uint32_t(exponent - half + 127) << 23);
  return x < -87.33654f ? 0.0f : e * scale0 * scale1;
#endif
}
CKPT_HD double exp_acc(double x) {
  return std::exp(x);
}

// 2^x of a softmax's argument, which is not above 127: 2^n * 2^r with |r| <= 1/2 and a degree-5
// polynomial; error below 3 ulp. 0 from -125.5 down: the exponent's field of 2^(n - 1), of which
// twice 2^r is taken, runs out just where results would be subnormal. Half of exp_acc's
// instructions, where log2(e) is part of a factor that x has anyway.
CKPT_HD float exp2_softmax(float x) {
  const float clamped = -126.0f > x ? -126.0f : x;
  const float shifted = clamped + 12582912.0f;
  const float r = clamped - (shifted - 12582912.0f);
  float q = 2.6539042592e-3f;
  q = q * r + 1.9342582673e-2f;
  q = q * r + 1.1101421714e-1f;
  q = q * r + 4.8044493794e-1f;
  q = q * r + 1.3862940073f;
  q = q * r + 2.0f;
  return q * bits_to_float((float_to_bits(shifted) + (126u - 0x4b400000u)) << 23);
}
CKPT_HD double exp2_softmax(double x) {
  return std::exp2(x);
}

// exp in two instructions on device, for terms of a softmax: its error is 2 ulps and one more for
// each unit of |x|, and results that would be subnormal are 0.
CKPT_HD float exp_approx(float x) {
#if CKPT_DEVICE
  return ex2_approx_ftz(mul_rn(x, 1.44269504f));
#else
  return exp_acc(x);
#endif
}
CKPT_HD double exp_approx(double x) {
  return std::exp(x);
}

// tanh: odd polynomial for |x| < 0.625, 1 - 2/(e^{2|x|}+1) beyond; error below 2 ulp.
CKPT_HD float tanh_acc(float x) {
#if CKPT_DEVICE
  return ::tanhf(x);
#else
  const float a = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float small = p * z * x + x;
  const float large = 1.0f - 2.0f / (exp_acc(2.0f * a) + 1.0f);
  return a < 0.625f ? small : (x < 0.0f ? -large : large);
#endif
}
CKPT_HD double tanh_acc(double x) {
  return std::tanh(x);
}

// e^x - 1 of x that are not above 0, by the tangent: error below 4 ulp.
CKPT_HD float expm1_acc(float x) {
#if CKPT_DEVICE
  return ::expm1f(x);
#else
  const float t = tanh_acc(0.5f * x);
  return (t + t) / (1.0f - t);
#endif
}
CKPT_HD double expm1_acc(double x) {
  return std::expm1(x);
}

// erf: an odd polynomial for |x| < 0.927734375, 1 - e^q(|x|) beyond; error below 2 ulp.
CKPT_HD float erf_acc(float x) {
#if CKPT_DEVICE
  return ::erff(x);
#else
  const float a = x < 0.0f ? -x : x;
  const float z = x * x;
  float p = -5.96761703e-4f;
  p = p * z + 4.99119423e-3f;
  p = p * z - 2.67681349e-2f;
  p = p * z + 1.12819925e-1f;
  p = p * z - 3.76125336e-1f;
  p = p * z + 1.28379166e-1f;
  const float small = p * x + x;
  const float b = a > 4.0f ? 4.0f : a;  // erf(4) rounds to 1
  float q = -1.72853470e-5f * b + 3.83197126e-4f;
  q = q * (b * b) + (-3.88396438e-3f * b + 2.42546219e-2f);
  q = q * b - 1.06777877e-1f;
  q = q * b - 6.34846687e-1f;
  q = q * b - 1.28717512e-1f;
  q = q * b - b;
  const float large = 1.0f - exp_acc(q);
  return a > 0.927734375f ? (x < 0.0f ? -large : large) : small;  // NaN takes the polynomial
#endif
}
CKPT_HD double erf_acc(double x) {
  return std::erf(x);
}

// 1 / (1 + e^-x); error below 4 ulps on device: 2 of e^-x, half of the sum, 1 of the reciprocal,
// whose subnormal results are 0.
CKPT_HD float sigmoid_acc(float x) {
#if CKPT_DEVICE
  // Not contracted with the product inside expf, so that every kernel gets the same bits.
  return rcp_approx_ftz(add_rn(1.0f, exp_acc(-x)));
#else
  return 1.0f / (1.0f + exp_acc(-x));
#endif
}
CKPT_HD double sigmoid_acc(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

}  // namespace ckptfused
