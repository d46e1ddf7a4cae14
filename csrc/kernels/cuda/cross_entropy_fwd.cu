#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/cross_entropy.h"

namespace ckptfused {
namespace {

// What is known of some of a row's logits: the largest and where it is first, and the sum of
// exp(l - max). A NaN is the largest of all.
template <typename A>
struct Softmax {
  A max, sum;
  int64_t index;  // of max; behind all classes where there is none

  __device__ __forceinline__ bool before(const Softmax& other) const {
    const bool nan = max != max, other_nan = other.max != other.max;
    if (nan != other_nan) return nan;
    return nan || max == other.max ? index < other.index : max > other.max;
  }
  __device__ __forceinline__ void add(const Softmax& other) {
    const bool mine = before(other);
    const A most = mine ? max : other.max, shift = softmax_shift(most);
    sum = sum * exp_acc(max - shift) + other.sum * exp_acc(other.max - shift);
    if (!mine) {
      max = other.max;
      index = other.index;
    }
  }
};

template <typename A>
__device__ __forceinline__ Softmax<A> shuffled(const Softmax<A>& s, int mask) {
  return {__shfl_xor_sync(~0u, s.max, mask), __shfl_xor_sync(~0u, s.sum, mask),
          __shfl_xor_sync(~0u, s.index, mask)};
}

// Of all threads of the block, known to each.
template <typename A>
__device__ __forceinline__ Softmax<A> over_block(Softmax<A> s) {
  __shared__ Softmax<A> slots[kLossWarps];
  CKPT_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) s.add(shuffled(s, mask));
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = s;
  __syncthreads();
  s = slots[0];
  for (int warp = 1; warp < kLossWarps; ++warp) s.add(slots[warp]);
  return s;
}

template <typename A>
__device__ __forceinline__ A sum_over_block(A value) {
  __shared__ A slots[kLossWarps];
  CKPT_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(~0u, value, mask);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  value = slots[0];
  for (int warp = 1; warp < kLossWarps; ++warp) value += slots[warp];
  return value;
}

template <typename T>
__device__ __forceinline__ Softmax<acc_t<T>> softmax_of(const CrossEntropyShape& a, const T* row,
                                                        bool vectors) {
  using A = acc_t<T>;
  Softmax<A> mine{A(-INFINITY), A(0), a.cols};
  for_logits(a, row, vectors, [&](int64_t col, int count, const A* l) {
    Softmax<A> group{A(-INFINITY), A(0), a.cols};
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const Softmax<A> one{l[i], A(0), col + i};
      if (i < count && one.before(group)) {
        group.max = one.max;
        group.index = one.index;
      }
    }
    const A shift = softmax_shift(group.max);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) group.sum += i < count ? exp_acc(l[i] - shift) : A(0);
    mine.add(group);
  });
  return over_block(mine);
}

template <typename T>
__global__ void __launch_bounds__(kLossThreads, kLossBlocks<acc_t<T>>)
    cross_entropy_fwd_kernel(CrossEntropyFwd a, bool vectors) {
  using A = acc_t<T>;
  const int64_t row = blockIdx.x, target = a.target[row];
  T* x = static_cast<T*>(a.logits) + row * a.stride;
  const Softmax<A> softmax = softmax_of(a, x, vectors);
  const A lse = softmax.max + std::log(softmax.sum);
  A smooth = A(0);
  if (a.smooth != 0) {
    for_logits(a, x, vectors, [&](int64_t col, int count, const A* l) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) smooth += class_weight_of<A>(a, col + i) * (lse - l[i]);
      }
    });
    smooth = sum_over_block(smooth);
  }
  if (threadIdx.x == 0) {
    A loss = A(0);
    if (target != a.ignore_index) {
      const bool known = is_class(a, target);
      const A own = known ? class_weight_of<A>(a, target) : A(NAN);
      const A logit = known ? logit_map<A>(a).value(to_acc(x[target])) : A(NAN);
      loss = own * (A(1) - A(a.smoothing)) * (lse - logit) + A(a.smooth) * smooth +
             A(a.z_loss) * lse * lse;
    }
    static_cast<A*>(a.loss)[row] = loss;
    static_cast<A*>(a.lse)[row] = lse;
    if (a.predicted != nullptr) a.predicted[row] = softmax.index < a.cols ? softmax.index : 0;
  }
  if (!a.grad) return;
  __syncthreads();  // thread 0 has read the target's logit
  write_gradient(a, x, vectors, target, lse, A(1));
}

}  // namespace

const char* cross_entropy_fwd_cuda(const CrossEntropyFwd& a, int64_t rows, void* stream) {
  if (rows == 0) return nullptr;
  return for_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    return launch(cross_entropy_fwd_kernel<T>, grid_of(rows), dim3(kLossThreads), stream, a,
                  whole_vectors<T>(a.logits, a.stride));
  });
}

}  // namespace ckptfused
