#pragma once

#include "math/types.h"

namespace ckptfused {

// Calls f(T{}) for the type.
template <typename F>
const char* for_type(DType dtype, F f) {
  switch (dtype) {
    case DType::f64:
      return f(double{});
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(f16{});
  }
  return "unknown dtype";
}

// Calls f(R{}, P{}) for a row type R (of the residual stream) and a compute type P: the same type,
// or a 16-bit P beside a float R.
template <typename F>
const char* for_row_types(DType r, DType p, F f) {
  if (r == DType::f64 && p == DType::f64) return f(double{}, double{});
  if (r == DType::f32 && p == DType::f32) return f(float{}, float{});
  if (r == DType::f32 && p == DType::bf16) return f(float{}, bf16{});
  if (r == DType::f32 && p == DType::f16) return f(float{}, f16{});
  if (r == DType::bf16 && p == DType::bf16) return f(bf16{}, bf16{});
  if (r == DType::f16 && p == DType::f16) return f(f16{}, f16{});
  return "no kernel for this pair of dtypes";
}

}  // namespace ckptfused
