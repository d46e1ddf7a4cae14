#pragma once

#include "ops/torch.h"

#include <string>

#include "math/types.h"

// Checks that the ops share. A message names the op and the argument, what was expected and what
// came: check_tensor("norm_fwd", "y", y, {n, c}, at::kFloat, x.device()) fails as
//   norm_fwd: y: expected Float [4, 8] on cpu, contiguous, got BFloat16 [4, 9] on cpu

namespace ckptfused {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& t) {
  return t.has_value() && t->defined();
}

// Whether a strided tensor's storage is allocated as far as its sizes and strides reach. A raw
// pointer says nothing about that, nor do most of PyTorch's operators: a storage can be resized
// behind the back of whoever saved the tensor.
bool has_memory(const at::Tensor& t);

// Raises unless t is strided and has memory. The checks below include this one.
void check_memory(const char* op, const std::string& name, const at::Tensor& t);

inline void check_memory(const char* op, const std::string& name, const OptionalTensor& t) {
  if (given(t)) check_memory(op, name, *t);
}

// Null where the tensor is absent.
inline const void* const_data(const OptionalTensor& t) {
  return given(t) ? t->const_data_ptr() : nullptr;
}
inline void* mutable_data(const OptionalTensor& t) {
  return given(t) ? t->mutable_data_ptr() : nullptr;
}

inline void check_tensor(const char* op, const char* name, const at::Tensor& t,
                         at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  TORCH_CHECK(
      t.sizes() == sizes && t.scalar_type() == dtype && t.device() == device && t.is_contiguous(),
      op, ": ", name, ": expected ", dtype, " ", sizes, " on ", device, ", contiguous, got ",
      t.scalar_type(), " ", t.sizes(), " on ", t.device(),
      t.is_contiguous() ? "" : ", not contiguous");
  check_memory(op, name, t);
}

inline void check_tensor(const char* op, const char* name, const OptionalTensor& t,
                         at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  if (given(t)) check_tensor(op, name, *t, sizes, dtype, device);
}

// The type that norms, softmax and reductions accumulate in.
inline at::ScalarType acc_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline DType kernel_dtype(const char* op, const char* name, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return DType::f64;
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      TORCH_CHECK(false, op, ": ", name, ": expected float64, float32, bfloat16 or float16, got ",
                  t.scalar_type());
  }
}

// A value of the compute type beside one of the residual stream's.
inline void check_dtype_pair(const char* op, const char* name, at::ScalarType compute,
                             at::ScalarType stream) {
  const bool mixed = stream == at::kFloat && (compute == at::kBFloat16 || compute == at::kHalf);
  TORCH_CHECK(compute == stream || mixed, op, ": ", name, ": expected ", stream,
              stream == at::kFloat ? ", BFloat16 or Half" : "", " beside ", stream, " rows, got ",
              compute);
}

inline void check_probability(const char* op, double p) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": p: expected a probability in [0, 1], got ", p);
}

inline void check_rng_state(const char* op, const OptionalTensor& state, at::Device device) {
  TORCH_CHECK(given(state), op, ": rng_state: expected Long [2] since p > 0, got none");
  check_tensor(op, "rng_state", *state, {2}, at::kLong, device);
}

}  // namespace ckptfused
