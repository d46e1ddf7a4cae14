#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/cross_entropy.h"

namespace ckptfused {
namespace {

// combine(a, b) over what all threads of the block have, known to each; `rest` changes nothing.
template <typename A, typename Combine>
__device__ __forceinline__ A over_block(A value, A rest, Combine combine) {
  __shared__ A slots[kLossWarps];
  const int lane = int(threadIdx.x) % 32;
  CKPT_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, mask));
  }
  __syncthreads();  // the last values have been read
  if (lane == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < kLossWarps ? slots[lane] : rest;
  CKPT_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, mask));
  }
  return value;
}
template <typename A>
__device__ __forceinline__ A sum_over_block(A value) {
  return over_block(value, A(0), [](A a, A b) { return a + b; });
}

// What is known of some of a row's logits: the largest as it is held, the first column of the group
// where it is first, and the sum of exp(l - max). NaN is passed over: the sum has it.
template <typename A>
struct Softmax {
  A max = A(-INFINITY), sum = A(0);
  int at = 0;
};

template <bool kPlain, typename T>
__device__ __forceinline__ Softmax<acc_t<T>> softmax_of(const CrossEntropyShape& a, const T* row,
                                                        bool vectors) {
  using A = acc_t<T>;
  const Logits<A, kPlain> logits(a);
  Softmax<A> s;
  for_products<false, true>(a, row, vectors, [&](int col, int count, const A* x) {
    A held[kGroup], p[kGroup], top = A(-INFINITY);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      held[i] = i < count ? logits.hold(x[i]) : A(-INFINITY);
      top = std::fmax(top, held[i]);
    }
    if (top > s.max) {
      s.sum *= exp_approx(logits.value(s.max) - logits.value(top));
      s.max = top;
      s.at = col;
    }
    const A shift = softmax_shift(logits.value(s.max));
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) p[i] = exp_approx(logits.less(held[i], shift));
    s.sum += ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
  });
  return s;
}

// The first column of the row whose logit is the largest, or NaN where one is; 0 if there is none.
template <bool kPlain, typename T>
__device__ __forceinline__ int predicted_of(const CrossEntropyShape& a, const T* row, bool vectors,
                                            const Softmax<acc_t<T>>& s, acc_t<T> max,
                                            acc_t<T> sum) {
  using A = acc_t<T>;
  const auto least = [](int a, int b) { return a < b ? a : b; };
  const int none = int(a.cols);
  int first = none;
  if (sum != sum) {  // infinities, too, make it NaN
    for_products<false, false>(a, row, vectors, [&](int col, int count, const A* x) {
      for (int i = kGroup; i-- > 0;)
        first = i < count && x[i] != x[i] ? least(first, col + i) : first;
    });
    first = over_block(first, none, least);
    if (first < none) return first;
  }
  if (s.max == max && max != A(-INFINITY)) {
    const Logits<A, kPlain> logits(a);
    for (int i = 0; first == none; ++i) {
      if (logits.hold(to_acc(row[s.at + i])) == max) first = s.at + i;
    }
  }
  first = over_block(first, none, least);
  return first < none ? first : 0;
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks<acc_t<T>>)
    cross_entropy_fwd_kernel(CrossEntropyFwd a, bool vectors) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x, target = a.target[row];
  T* x = static_cast<T*>(a.logits) + row * a.stride;
  const Logits<A, kPlain> logits(a);
  const Softmax<A> s = softmax_of<kPlain>(a, x, vectors);
  const A held = over_block(s.max, A(-INFINITY), [](A a, A b) { return std::fmax(a, b); });
  const A max = logits.value(held), shift = softmax_shift(max);
  const A sum = sum_over_block(s.sum * exp_approx(softmax_shift(logits.value(s.max)) - shift));
  const A lse = max + std::log(sum);
  if (a.predicted != nullptr) {
    const int predicted = predicted_of<kPlain>(a, x, vectors, s, held, sum);
    if (threadIdx.x == 0) a.predicted[row] = predicted;
  }
  A smooth = A(0);
  if (a.smooth != 0) {
    for_products<false, false>(a, x, vectors, [&](int col, int count, const A* products) {
      A weight[kGroup];
      if constexpr (!kPlain) load_class_weights(a, col, count, weight);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const A less = -logits.less(logits.hold(products[i]), lse);
        if (i < count) smooth += kPlain ? less : weight[i] * less;
      }
    });
    smooth = sum_over_block(smooth);
  }
  if (threadIdx.x == 0) {
    A loss = A(0);
    if (target != a.ignore_index) {
      const bool known = is_class(a, target);
      const A own = known ? class_weight_of<A>(a, target) : A(NAN);
      const A logit = known ? logits.value(logits.hold(to_acc(x[target]))) : A(NAN);
      loss = own * (A(1) - A(a.smoothing)) * (lse - logit) + A(a.smooth) * smooth +
             A(a.z_loss) * lse * lse;
    }
    static_cast<A*>(a.loss)[row] = loss;
    static_cast<A*>(a.lse)[row] = lse;
  }
  if (!a.grad) return;
  __syncthreads();  // thread 0 has read the target's logit
  write_gradient<kPlain>(a, x, vectors, target, lse, A(1));
}

}  // namespace

const char* cross_entropy_fwd_cuda(const CrossEntropyFwd& a, int64_t rows, void* stream) {
  if (rows == 0) return nullptr;
  return for_type_and_logits(a, [&](auto t, auto plain) {
    using T = decltype(t);
    return launch(cross_entropy_fwd_kernel<T, decltype(plain)::value>, grid_of(rows),
                  dim3(kLossThreads), stream, a, whole_vectors<T>(a.logits, a.stride));
  });
}

}  // namespace ckptfused
