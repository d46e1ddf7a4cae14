#pragma once

#include <cstdint>

#include "math/norm.h"
#include "math/rope.h"
#include "math/types.h"

namespace ckptfused {

// A [B, T, heads, D] view whose last dimension is contiguous; strides in elements.
template <typename Pointer>
struct HeadsView {
  Pointer data = nullptr;
  int64_t batch_stride = 0, time_stride = 0, head_stride = 0;
};

// Query or key heads: normalisation over each head, then RoPE of the first rotary_dim entries.
// "acc" is double if the heads are, else float.
struct QkShape {
  DType dtype;
  NormKind norm;
  double eps;
  RopeKind rope;
  int64_t time, heads, head_dim, rotary_dim;
  const void* weight;  // [D] acc; null if there is no norm
  const void* cos;     // [B or 1, T, rotary_dim / 2] acc, likewise sin; null if there is no RoPE
  const void* sin;
  int64_t cos_batch_stride;  // of cos and sin; 0 if all sequences share them
};

// y = rope(norm(x)), for tokens b*T + t in [begin, end). y may be x.
struct QkFwd : QkShape {
  const void* bias;  // [D] acc, or null
  HeadsView<const void*> x;
  HeadsView<void*> y;
};
void qk_fwd_rows(const QkFwd& a, int64_t begin, int64_t end);

// dx from the gradient dy of y; dx may be x or dy. x is read only if there is a norm, whose
// gradients are then added to dweight and dbias, [D] acc, where these are not null.
struct QkBwd : QkShape {
  HeadsView<const void*> dy, x;
  HeadsView<void*> dx;
};
void qk_bwd_rows(const QkBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias);

}  // namespace ckptfused
