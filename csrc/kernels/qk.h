#pragma once

#include <cstdint>

#include "kernels/norm.h"
#include "math/rope.h"

namespace ckptfused {

// What the q/k norm and RoPE kernels of every device take.

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
  NormParam weight;  // [D]
  const void* cos;   // [B or 1, T, rotary_dim / 2] acc, likewise sin; null if there is no RoPE
  const void* sin;
  int64_t cos_batch_stride;  // of cos and sin; 0 if all sequences share them
};

// y = rope(norm(x)). y may be x.
struct QkFwd : QkShape {
  NormParam bias;  // [D]
  HeadsView<const void*> x;
  HeadsView<void*> y;
};

// dx from the gradient dy of y; dx may be x or dy. x is read only if there is a norm.
struct QkBwd : QkShape {
  HeadsView<const void*> dy, x;
  HeadsView<void*> dx;
};

// In how many chunks of consecutive heads a GPU sums the gradients of a norm's parameters: as many
// blocks as it holds at once, but no more than have 64 heads each.
inline int64_t qk_grad_chunks(int64_t tokens, int64_t heads, int64_t /*head_dim*/,
                              int64_t multiprocessors) {
  const int64_t most = 4 * multiprocessors, wanted = (tokens * heads + 63) / 64;
  return wanted < 1 ? 1 : (wanted < most ? wanted : most);
}

}  // namespace ckptfused
