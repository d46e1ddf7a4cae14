#pragma once

// What the row kernels share. Everything a kernel calls from inside a row is CKPT_HD (always
// inlined), so that it is compiled for the instruction set of the kernel.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "kernels/norm.h"
#include "math/dropout.h"
#include "math/norm.h"
#include "math/types.h"

// Before a loop whose iterations touch only their own index, so that buffers may be one another.
#if defined(__clang__)
#define CKPT_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define CKPT_IVDEP _Pragma("GCC ivdep")
#endif

// On the lambdas of this header only. One written in an .inl file already belongs to the kernel's
// instruction set, is inlined once its helper is, and must not carry it.
#define CKPT_INLINE __attribute__((always_inline))

namespace ckptfused {

// Cache-line aligned scratch of one row range, handed out in pieces.
class RowScratch {
 public:
  explicit RowScratch(size_t bytes)
      : begin_(static_cast<char*>(std::aligned_alloc(kAlign, bytes + kAlign - bytes % kAlign))),
        next_(begin_) {
    if (begin_ == nullptr) throw std::bad_alloc();
  }
  ~RowScratch() { std::free(begin_); }
  RowScratch(const RowScratch&) = delete;
  RowScratch& operator=(const RowScratch&) = delete;

  // Bytes that take<T>(count) uses up.
  template <typename T>
  static size_t size(int64_t count) {
    return (size_t(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  }
  template <typename T>
  CKPT_HD T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += (size_t(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return piece;
  }

 private:
  static constexpr size_t kAlign = 64;
  char* begin_;
  char* next_;
};

// Calls f(T{}) for the storage type T.
template <typename F>
CKPT_HD void for_type(DType dtype, F f) {
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
}

// Calls f(R{}, P{}) for a row type R (of the residual stream) and a compute type P: the same type,
// or a 16-bit P beside a float R. False when the pair is none of these.
template <typename F>
CKPT_HD bool for_row_types(DType r, DType p, F f) {
  if (r == DType::f64 && p == DType::f64) return f(double{}, double{}), true;
  if (r == DType::f32 && p == DType::f32) return f(float{}, float{}), true;
  if (r == DType::f32 && p == DType::bf16) return f(float{}, bf16{}), true;
  if (r == DType::f32 && p == DType::f16) return f(float{}, f16{}), true;
  if (r == DType::bf16 && p == DType::bf16) return f(bf16{}, bf16{}), true;
  if (r == DType::f16 && p == DType::f16) return f(f16{}, f16{}), true;
  return false;
}

// Rows in chunks of which each may be some thread's: sums over rows are made a chunk at a time and
// the partial sums added in order, so they are the same for every thread count.
struct RowChunks {
  int64_t rows, count;
  // Of 16 rows, or of more where those would be more than 64 or than count. The last may be empty.
  int64_t size() const {
    const int64_t least = rows > 64 * 16 ? (rows + 63) / 64 : 16;
    const int64_t even = count > 0 ? (rows + count - 1) / count : 0;
    return even > least ? even : least;
  }
  int64_t begin(int64_t chunk) const { return chunk * size() < rows ? chunk * size() : rows; }
  int64_t end(int64_t chunk) const { return begin(chunk + 1); }
};

// How many suit a CPU: at most 64, a function of the number of rows alone.
inline int64_t cpu_grad_chunks(int64_t rows) {
  const int64_t size = RowChunks{rows, 0}.size();
  return (rows + size - 1) / size;
}

// out = in, converted to the accumulation type.
template <typename T>
CKPT_HD void load_row(const T* in, acc_t<T>* out, int64_t n) {
  CKPT_IVDEP
  for (int64_t i = 0; i < n; ++i) out[i] = to_acc(in[i]);
}

// out = in, rounded to T.
template <typename T>
CKPT_HD void store_row(const acc_t<T>* in, T* out, int64_t n) {
  CKPT_IVDEP
  for (int64_t i = 0; i < n; ++i) from_acc(in[i], out[i]);
}

// Lanes folded in pairs, low and high half by half, as vectors: low = f(low, high).
template <int kLanes, typename A, typename Fold>
CKPT_HD A fold_halves(const A* lane, Fold f) {
  if constexpr (kLanes == 1) {
    return lane[0];
  } else {
    typedef A Half __attribute__((vector_size(kLanes / 2 * sizeof(A))));
    Half low, high;
    __builtin_memcpy(&low, lane, sizeof low);
    __builtin_memcpy(&high, lane + kLanes / 2, sizeof high);
    f(low, high);
    A folded[kLanes / 2];
    __builtin_memcpy(folded, &low, sizeof low);
    return fold_halves<kLanes / 2>(folded, f);
  }
}

template <int kLanes, typename A>
CKPT_HD A fold_lanes(const A* lane) {
  return fold_halves<kLanes>(lane, [](auto& low, const auto& high) CKPT_INLINE { low += high; });
}

// The sum of term(0) .. term(n - 1) in a fixed order: element i goes to lane i % kLanes, the lanes
// are then added pairwise. term may write to index i of a row, too.
template <typename A, typename Term>
CKPT_HD A lane_sum(int64_t n, Term term) {
  constexpr int kLanes = 128 / int(sizeof(A));  // two 512-bit registers
  A lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    CKPT_IVDEP
    for (int l = 0; l < kLanes; ++l) lane[l] += term(i + l);
  }
  for (int l = 0; i < n; ++l, ++i) lane[l] += term(i);
  return fold_lanes<kLanes>(lane);
}

// Statistics of a row held in the accumulation type: two passes, mean then variance. Those of a
// kind without any leave the row as it is.
template <typename A>
CKPT_HD NormStats<A> norm_stats(NormKind kind, const A* x, int64_t n, A eps) {
  if (!norm_has_stats(kind)) return {A(0), A(1)};
  A mean = 0;
  if (norm_is_centred(kind)) {
    mean = lane_sum<A>(n, [&](int64_t i) CKPT_INLINE { return x[i]; }) / A(n);
  }
  const A squares = lane_sum<A>(n, [&](int64_t i) CKPT_INLINE {
    const A d = x[i] - mean;
    return d * d;
  });
  return make_norm_stats(mean, squares / A(n), eps);
}

// A norm's parameters converted to the accumulation type, in scratch: what xhat is multiplied by
// (ones if there is no weight, 1 + w for Gemma's norm), and the bias or null. Made once for a row
// range, so they are functions of rows.cpp and not inlined.
template <typename A>
const A* norm_gain(NormKind kind, NormParam weight, int64_t n, RowScratch& scratch);
template <typename A>
const A* norm_bias(NormParam bias, int64_t n, RowScratch& scratch);

// y = xhat * weight + bias. bias may be null; y may be x.
template <typename A, typename T>
CKPT_HD void norm_apply(const A* x, NormStats<A> stats, const A* weight, const A* bias, T* y,
                        int64_t n) {
  if (bias == nullptr) {
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) from_acc(normalised(x[i], stats) * weight[i], y[i]);
  } else {
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) from_acc(normalised(x[i], stats) * weight[i] + bias[i], y[i]);
  }
}

// Gradients of one row. On entry x holds the row and dy its output's gradient; on return x holds
// xhat and dy the input's gradient. The row's share is added to dweight and dbias (null: skipped).
// Kind none leaves all as it is.
template <typename A>
CKPT_HD void norm_grad(NormKind kind, A* x, A* dy, const A* weight, A* dweight, A* dbias, A eps,
                       int64_t n) {
  if (kind == NormKind::none) return;
  const NormStats<A> stats = norm_stats(kind, x, n, eps);
  const A sum_gx = lane_sum<A>(n, [&](int64_t i) CKPT_INLINE {
    x[i] = normalised(x[i], stats);
    return dy[i] * weight[i] * x[i];
  });
  A sum_g = 0;
  if (norm_is_centred(kind)) {
    sum_g = lane_sum<A>(n, [&](int64_t i) CKPT_INLINE { return dy[i] * weight[i]; });
  }
  if (dweight != nullptr) {
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) dweight[i] += dy[i] * x[i];
  }
  if (dbias != nullptr) {
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) dbias[i] += dy[i];
  }
  const A mean_g = sum_g / A(n), mean_gx = norm_has_stats(kind) ? sum_gx / A(n) : A(0);
  CKPT_IVDEP
  for (int64_t i = 0; i < n; ++i) {
    dy[i] = norm_input_grad(dy[i] * weight[i], x[i], stats.rstd, mean_g, mean_gx);
  }
}

// How many uint16_t dropout_draws needs for a run of cols columns.
CKPT_HD int64_t dropout_buffer_size(int64_t cols) {
  return (cols / 8 + 2) * 8;
}

// x * scale if the draw keeps the element, 0 (also for NaN and infinity) if it drops it.
template <typename A>
CKPT_HD A dropout_apply(A x, uint16_t draw, uint32_t threshold, A scale) {
  return uint32_t(draw) >= threshold ? x * scale : A(0);
}

}  // namespace ckptfused
