#include "kernels/cpu/rows.h"

namespace ckptfused {
namespace {

template <typename A>
A* converted(NormParam param, int64_t n, RowScratch& scratch) {
  A* out = scratch.take<A>(n);
  for_type(param.dtype, [&](auto t) {
    const auto* in = static_cast<const decltype(t)*>(param.data);
    for (int64_t i = 0; i < n; ++i) out[i] = A(to_acc(in[i]));
  });
  return out;
}

}  // namespace

template <typename A>
const A* norm_gain(NormKind kind, NormParam weight, int64_t n, RowScratch& scratch) {
  if (weight.data == nullptr) {
    A* ones = scratch.take<A>(n);
    for (int64_t i = 0; i < n; ++i) ones[i] = A(1);
    return ones;
  }
  A* gain = converted<A>(weight, n, scratch);
  if (norm_adds_one(kind)) {
    for (int64_t i = 0; i < n; ++i) gain[i] += A(1);
  }
  return gain;
}

template <typename A>
const A* norm_bias(NormParam bias, int64_t n, RowScratch& scratch) {
  return bias.data == nullptr ? nullptr : converted<A>(bias, n, scratch);
}

template const float* norm_gain(NormKind, NormParam, int64_t, RowScratch&);
template const double* norm_gain(NormKind, NormParam, int64_t, RowScratch&);
template const float* norm_bias(NormParam, int64_t, RowScratch&);
template const double* norm_bias(NormParam, int64_t, RowScratch&);

}  // namespace ckptfused
