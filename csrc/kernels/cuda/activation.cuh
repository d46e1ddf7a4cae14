#pragma once

#include <type_traits>

#include "kernels/activation.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/types.cuh"

namespace ckptfused {

// Columns col .. of a row.
template <typename T>
CKPT_HD const T* at(Strided<const void*> t, int64_t row, int64_t col) {
  return static_cast<const T*>(t.data) + row * t.stride + col;
}
template <typename T>
CKPT_HD T* at(Strided<void*> t, int64_t row, int64_t col) {
  return static_cast<T*>(t.data) + row * t.stride + col;
}

template <typename T, typename Pointer>
bool whole_vectors(Strided<Pointer> t) {
  return whole_vectors<T>(t.data, t.stride);
}

// The draws of the eight columns from col on, a multiple of 8; any value where there is no dropout.
// kAligned: col0 is one, too, so that one call decides them.
template <bool kAligned>
CKPT_HD Philox4x32 group_draws(const ActivationShape& a, const Dropout& dropout, int64_t row,
                               int64_t col) {
  if (!dropout.active()) return {};
  const int64_t drawn_row = a.rows(a.row0 + row);
  if constexpr (kAligned) return dropout.draw(drawn_row, (a.col0 + col) / kGroup);
  return dropout.draw_from(drawn_row, a.col0 + col);
}

// xIELU's coefficients; of others there are none, and nothing is read.
template <Activation kAct, typename A>
__device__ __forceinline__ XieluCoefficients<A> coefficients_of(const ActivationShape& a) {
  if constexpr (kAct == Activation::xielu) return a.coefficients_as<A>();
  return {};
}

// Calls f(T{}, activation, gate), the last two std::integral_constants, for what the arguments ask.
template <typename T, Activation kAct, bool kHasGated, typename F>
const char* for_gate(const ActivationShape& a, F f) {
  using Act = std::integral_constant<Activation, kAct>;
  if (!a.gated) return f(T{}, Act{}, std::false_type{});
  if constexpr (kHasGated) {
    return f(T{}, Act{}, std::true_type{});
  } else {
    return "this activation has no gated form";
  }
}

template <typename T, typename F>
const char* for_activation(const ActivationShape& a, F f) {
  switch (a.act) {
#define CKPT_CASE(kind, gated) \
  case Activation::kind:       \
    return for_gate<T, Activation::kind, gated>(a, f);
    CKPT_FOR_ACTIVATIONS(CKPT_CASE)
#undef CKPT_CASE
  }
  return "unknown activation";
}

template <typename F>
const char* for_type_and_activation(const ActivationShape& a, F f) {
  return for_type(a.dtype, [&](auto t) { return for_activation<decltype(t)>(a, f); });
}

}  // namespace ckptfused
