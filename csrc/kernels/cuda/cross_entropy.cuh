#pragma once

#include <cmath>
#include <type_traits>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/types.cuh"
#include "math/softmax.h"

// A block takes one row of logits. A thread owns every kLossThreads-th group of eight, so that sums
// have one order.

namespace ckptfused {

constexpr int kLossThreads = 512;
constexpr int kLossWarps = kLossThreads / 32;
// Blocks that a multiprocessor must be able to hold; the compiler otherwise aims higher, and
// spills.
template <typename A>
constexpr int kLossBlocks = sizeof(A) == 8 ? 1 : 2;
// Groups that are on their way to a thread: 32 bytes, and kFar 64: where a pass only reads, memory
// answers after the time of two such rounds. Only the softmax's has the registers for it. Doubles
// are not read ahead.
template <typename T>
constexpr bool kLossPrefetch = sizeof(T) < sizeof(double);  // registers
template <typename T, bool kFar>
constexpr int kLossAhead = kLossPrefetch<T> ? 4 / sizeof(T) * (kFar ? 2 : 1) : 1;

// Logits as a thread holds them: numbers of the same order that a factor makes logits of. kPlain:
// the products. Else products times the scale or, with a soft-cap, the hyperbolic tangent.
template <typename A, bool kPlain>
struct Logits {
  A scale, softcap;
  A before, factor;  // of a product, and of what is held

  __device__ __forceinline__ explicit Logits(const CrossEntropyShape& a)
      : scale(A(a.scale)), softcap(A(a.softcap)) {
    before = softcap != A(0) ? scale / softcap : scale;
    factor = kPlain ? scale : softcap != A(0) ? softcap : A(1);
  }
  __device__ __forceinline__ A hold(A product) const {
    if (kPlain) return product;
    return softcap != A(0) ? tanh_acc(product * before) : product * before;
  }
  __device__ __forceinline__ A value(A held) const { return held * factor; }
  __device__ __forceinline__ A less(A held, A reference) const {
    return std::fma(held, factor, -reference);
  }
  // Of a logit by its product.
  __device__ __forceinline__ A slope(A held) const {
    return kPlain || softcap == A(0) ? scale : scale * std::fma(-held, held, A(1));
  }
};

// Whether kPlain serves. Class weights matter to each logit only where the loss is smoothed.
inline bool plain_logits(const CrossEntropyShape& a) {
  return a.scale > 0 && a.softcap == 0 && (a.class_weight == nullptr || a.smooth == 0);
}

// Calls f(col, count, x) for each group of this thread, from its first on or, kBack, from its last
// whole one back: what a pass over a row has read last is in the second-level cache for the next.
// The next groups are on their way while some are worked on.
template <bool kBack, bool kFar, typename T, typename F>
__device__ __forceinline__ void for_products(const CrossEntropyShape& a, const T* row, bool vectors,
                                             F f) {
  constexpr int kAhead = kLossAhead<T, kFar>, kStride = kLossThreads * kGroup;
  constexpr bool kPrefetch = kLossPrefetch<T>;
  static_assert(kPrefetch || kAhead == 1, "what is not there would be read");
  constexpr int kStep = kBack ? -kStride : kStride;
  const int cols = int(a.cols), first = int(threadIdx.x) * kGroup;
  const int owned = vectors ? cols / kGroup - int(threadIdx.x) + kLossThreads - 1 : 0;
  const int whole = owned > 0 ? owned / kLossThreads : 0;  // groups
  int col = kBack ? first + (whole - 1) * kStride : first;
  const T* from = row + col;
  Raw<T, kGroup> next[kAhead];
  CKPT_UNROLL
  for (int i = 0; i < kAhead; ++i) {
    if (kPrefetch && i < whole) next[i].load(from + i * kStep, kGroup, true);
  }
  CKPT_NO_UNROLL
  for (int left = whole; left > 0; left -= kAhead) {
    Raw<T, kGroup> now[kAhead];
    CKPT_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const T* at = from + i * kStep;
      if (kPrefetch) {
        now[i] = next[i];
        if (i < left - kAhead) next[i].load(at + kAhead * kStep, kGroup, true);
      } else {
        now[i].load(at, kGroup, true);
      }
    }
    CKPT_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      acc_t<T> x[kGroup];
      now[i].unpack(x);
      if (i < left) f(col + i * kStep, kGroup, x);
    }
    from += kAhead * kStep;
    col += kAhead * kStep;
  }
  CKPT_NO_UNROLL
  for (col = first + whole * kStride; col < cols; col += kStride) {
    const int count = cols - col < kGroup ? cols - col : kGroup;
    acc_t<T> x[kGroup];
    load_group(row + col, count, false, x);
    f(col, count, x);
  }
}

constexpr int64_t kMaxClasses = int64_t(1) << 30;  // columns are counted in int

// Calls f(T{}, plain), plain a std::bool_constant, for what the arguments ask.
template <typename F>
const char* for_type_and_logits(const CrossEntropyShape& a, F f) {
  if (a.cols > kMaxClasses) return "logits of more than 2^30 classes";
  return for_type(a.dtype, [&](auto t) {
    if constexpr (sizeof(acc_t<decltype(t)>) == sizeof(float)) {
      if (plain_logits(a)) return f(t, std::true_type{});
    }
    return f(t, std::false_type{});
  });
}

template <typename A>
__device__ __forceinline__ A class_weight_of(const CrossEntropyShape& a, int64_t index) {
  const A* weight = static_cast<const A*>(a.class_weight);
  return weight == nullptr ? A(1) : weight[index];
}
// Those of classes col0 + col on; any where the loss is not smoothed.
template <typename A>
__device__ __forceinline__ void load_class_weights(const CrossEntropyShape& a, int col, int count,
                                                   A* weight) {
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) weight[i] = A(1);
  if (a.class_weight == nullptr || a.smooth == 0) return;
  const A* from = static_cast<const A*>(a.class_weight) + a.col0 + col;
  load_group(from, count, whole_vectors<A>(from, 0), weight);
}
template <typename A>
__device__ __forceinline__ A weight_sum_of(const CrossEntropyShape& a) {
  return a.class_weight == nullptr ? A(a.classes) : class_weight_of<A>(a, a.classes);
}

__device__ __forceinline__ bool is_class(const CrossEntropyShape& a, int64_t target) {
  return 0 <= target && target < a.classes;
}

// dloss/dproduct over the products of a row.
template <bool kPlain, typename T>
__device__ __forceinline__ void write_gradient(const CrossEntropyShape& a, T* row, bool vectors,
                                               int64_t target, acc_t<T> lse, acc_t<T> factor) {
  using A = acc_t<T>;
  const auto store = [&](int col, int count, const A* d) {
    store_group(d, count, count == kGroup && vectors, row + col);
  };
  if (target == a.ignore_index) {
    const A zeros[kGroup] = {};
    for (int col = int(threadIdx.x) * kGroup; col < int(a.cols); col += kLossThreads * kGroup) {
      store(col, int(a.cols) - col < kGroup ? int(a.cols) - col : kGroup, zeros);
    }
    return;
  }
  const bool known = is_class(a, target);
  const RowGradient<A> g =
      row_gradient(known ? class_weight_of<A>(a, target) : A(0), A(a.smoothing), A(a.smooth),
                   weight_sum_of<A>(a), A(a.z_loss), lse, known ? factor : A(NAN));
  const Logits<A, kPlain> logits(a);
  const auto gradient = [&](A l, A weight, A own) {
    const A p = exp_approx(logits.less(l, lse));
    const A slope = std::fma(p, g.all, -(kPlain ? g.smooth : weight * g.smooth)) - own;
    return slope * logits.slope(l);
  };
  // The target's class is done by the thread that owns it, after all of the others.
  const int64_t at = target - a.col0;
  const bool mine = 0 <= at && at < a.cols && at / kGroup % kLossThreads == threadIdx.x;
  const A own = mine ? logits.hold(to_acc(row[at])) : A(0);
  for_products<true, false>(a, row, vectors, [&](int col, int count, const A* x) {
    A d[kGroup], weight[kGroup];
    if constexpr (!kPlain) load_class_weights(a, col, count, weight);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      d[i] = gradient(logits.hold(x[i]), kPlain ? A(1) : weight[i], A(0));
    }
    store(col, count, d);
  });
  if (mine) from_acc(gradient(own, class_weight_of<A>(a, target), g.target), row[at]);
}

}  // namespace ckptfused
