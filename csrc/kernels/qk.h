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

// What one launch takes: heads of one kind, or those of q, of k and, of gradients, of v. They are
// of the same tokens and width.
template <typename Heads>
struct QkParts {
  Heads part[3];
  int count;

  QkParts() : part{}, count(0) {}
  QkParts(const Heads& only) : part{only}, count(1) {}  // NOLINT: implicit
};

// Where a GPU leaves the gradients of a norm's parameters: acc [chunks, head_dim] each, or null.
struct QkGrads {
  void *dweight = nullptr, *dbias = nullptr;
  int64_t chunks = 1;
};

// In how many chunks of rows of cols or, where heads is not 0, of consecutive heads of each row.
inline int64_t gpu_grad_chunks(int64_t rows, int64_t cols, int64_t heads, int64_t multiprocessors) {
  if (heads == 0) return row_grad_chunks(rows, cols, multiprocessors);
  // As many blocks as it holds at once, but no more than have 64 heads each.
  const int64_t most = 4 * multiprocessors, wanted = (rows * heads + 63) / 64;
  return wanted < 1 ? 1 : (wanted < most ? wanted : most);
}

}  // namespace ckptfused
