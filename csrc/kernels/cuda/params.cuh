#pragma once

#include "kernels/cuda/raw.cuh"
#include "kernels/norm.h"

// Weights and biases of norms, read in the dtype that the model holds them in.

namespace ckptfused {

template <typename T, typename A>
CKPT_HD void load_param_as(const void* data, int64_t col, int count, A* out) {
  acc_t<T> values[kGroup];
  const T* from = static_cast<const T*>(data) + col;
  load_group(from, count, whole_vectors<T>(from, kGroup), values);
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) out[i] = A(values[i]);
}

// Entries col .. col + count - 1, or `absent` where the norm has no such parameter.
template <typename A>
CKPT_HD void load_param(const NormParam& param, int64_t col, int count, A absent, A* out) {
  if (param.data == nullptr || count == 0) {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] = absent;
    return;
  }
  switch (param.dtype) {
    case DType::f64:
      return load_param_as<double>(param.data, col, count, out);
    case DType::f32:
      return load_param_as<float>(param.data, col, count, out);
    case DType::bf16:
      return load_param_as<bf16>(param.data, col, count, out);
    case DType::f16:
      return load_param_as<f16>(param.data, col, count, out);
  }
}

// What xhat is multiplied by.
template <typename A>
CKPT_HD void load_gain(NormKind kind, const NormParam& weight, int64_t col, int count, A* out) {
  load_param(weight, col, count, A(1), out);
  if (norm_adds_one(kind) && weight.data != nullptr) {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) out[i] += A(1);
  }
}

// What is added then. Without a bias that is -0, the number that changes no other when added.
template <typename A>
CKPT_HD void load_shift(const NormParam& bias, int64_t col, int count, A* out) {
  load_param(bias, col, count, A(-0.0), out);
}

}  // namespace ckptfused
