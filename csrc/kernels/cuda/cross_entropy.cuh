#pragma once

#include <cmath>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/types.cuh"
#include "math/softmax.h"

// A block takes one row of logits. A thread owns every kLossThreads-th group of eight, so that sums
// have one order. The second visit to a row finds it in the second-level cache.

namespace ckptfused {

constexpr int kLossThreads = 512;
constexpr int kLossWarps = kLossThreads / 32;
// Blocks that a multiprocessor must be able to hold; the compiler otherwise aims higher, and
// spills.
template <typename A>
constexpr int kLossBlocks = sizeof(A) == 8 ? 1 : 2;

template <typename A>
__device__ __forceinline__ LogitMap<A> logit_map(const CrossEntropyShape& a) {
  return {A(a.scale), A(a.softcap)};
}

// Calls f(col, count, l) for each group of this thread: the logits of classes col0 + col on.
template <typename T, typename F>
__device__ __forceinline__ void for_logits(const CrossEntropyShape& a, const T* row, bool vectors,
                                           F f) {
  using A = acc_t<T>;
  const LogitMap<A> map = logit_map<A>(a);
  CKPT_NO_UNROLL
  for (int64_t col = int64_t(threadIdx.x) * kGroup; col < a.cols; col += kLossThreads * kGroup) {
    const int64_t left = a.cols - col;
    const int count = left < kGroup ? int(left) : kGroup;
    A l[kGroup];
    load_group(row + col, count, vectors, l);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) l[i] = map.value(l[i]);
    f(col, count, l);
  }
}

template <typename A>
__device__ __forceinline__ A class_weight_of(const CrossEntropyShape& a, int64_t index) {
  const A* weight = static_cast<const A*>(a.class_weight);
  return weight == nullptr ? A(1) : weight[index];
}
template <typename A>
__device__ __forceinline__ A weight_sum_of(const CrossEntropyShape& a) {
  const A* weight = static_cast<const A*>(a.class_weight);
  return weight == nullptr ? A(a.classes) : weight[a.classes];
}

__device__ __forceinline__ bool is_class(const CrossEntropyShape& a, int64_t target) {
  return 0 <= target && target < a.classes;
}

// dloss/dproduct over the products of a row.
template <typename T>
__device__ __forceinline__ void write_gradient(const CrossEntropyShape& a, T* row, bool vectors,
                                               int64_t target, acc_t<T> lse, acc_t<T> factor) {
  using A = acc_t<T>;
  const bool ignored = target == a.ignore_index;
  if (!ignored && !is_class(a, target)) factor = A(NAN);
  const A own = ignored || !is_class(a, target) ? A(0) : class_weight_of<A>(a, target);
  const RowGradient<A> g =
      row_gradient(own, A(a.smoothing), A(a.smooth), weight_sum_of<A>(a), A(a.z_loss), lse, factor);
  const LogitMap<A> map = logit_map<A>(a);
  for_logits(a, row, vectors, [&](int64_t col, int count, const A* l) {
    A d[kGroup];
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const int64_t index = a.col0 + col + i;
      const A weight = i < count && g.smooth != A(0) ? class_weight_of<A>(a, index) : A(1);
      A slope = exp_acc(l[i] - lse) * g.all - weight * g.smooth;
      if (index == target) slope -= g.target;
      d[i] = ignored ? A(0) : slope * map.slope(l[i]);
    }
    store_group(d, count, vectors, row + col);
  });
}

}  // namespace ckptfused
