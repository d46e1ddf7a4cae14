#pragma once

#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/raw.cuh"
#include "kernels/norm.h"

// Weights and biases of norms, read in the dtype that the model holds them in.

namespace ckptfused {

struct AnyParam {};  // in place of a dtype that the compiler knows

// Whether all of these, where they are given, hold T at multiples of 16 bytes.
template <typename T>
bool params_are(std::initializer_list<NormParam> params) {
  constexpr DType dtype = std::is_same_v<T, float>  ? DType::f32
                          : std::is_same_v<T, bf16> ? DType::bf16
                          : std::is_same_v<T, f16>  ? DType::f16
                                                    : DType::f64;
  for (const NormParam& param : params) {
    if (param.data == nullptr) continue;
    if (param.dtype != dtype || !whole_vectors<T>(param.data, kGroup)) return false;
  }
  return true;
}

template <typename T, typename A>
CKPT_HD void load_param_as(const void* data, int64_t col, int count, bool vectors, A* out) {
  acc_t<T> values[kGroup];
  load_group(static_cast<const T*>(data) + col, count, vectors, values);
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) out[i] = A(values[i]);
}

// Entries col .. col + count - 1, or `absent` where the norm has no such parameter. W: AnyParam, or
// what params_are said; then all eight columns are there.
template <typename W, typename A>
CKPT_HD void load_param(const NormParam& param, int64_t col, int count, A absent, A* out) {
  if (param.data == nullptr || count == 0) {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] = absent;
  } else if constexpr (!std::is_same_v<W, AnyParam>) {
    load_param_as<W>(param.data, col, kGroup, true, out);
  } else {
    switch (param.dtype) {
      case DType::f64:
        return load_param_as<double>(param.data, col, count, false, out);
      case DType::f32:
        return load_param_as<float>(param.data, col, count, false, out);
      case DType::bf16:
        return load_param_as<bf16>(param.data, col, count, false, out);
      case DType::f16:
        break;
    }
    load_param_as<f16>(param.data, col, count, false, out);
  }
}

// What xhat is multiplied by.
template <typename W, typename A>
CKPT_HD void load_gain(NormKind kind, const NormParam& weight, int64_t col, int count, A* out) {
  load_param<W>(weight, col, count, A(1), out);
  if (kind == NormKind::gemma && weight.data != nullptr) {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] += A(1);
  }
}

// What is added then. Without a bias that is -0, the number that changes no other when added.
template <typename W, typename A>
CKPT_HD void load_shift(const NormParam& bias, int64_t col, int count, A* out) {
  load_param<W>(bias, col, count, A(-0.0), out);
}

}  // namespace ckptfused
