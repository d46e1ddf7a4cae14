#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/activation.h"
#include "kernels/cuda/row_sums.cuh"

namespace ckptfused {
namespace {

constexpr int kCoefficients = 4;
static_assert(kSumColumns == int64_t(kElementThreads) * kElementSteps * kGroup);

// Leaves a block's sums in its row of a.sums: those of the threads of a warp by shuffles, then
// those of the warps in order.
template <typename A>
__device__ void store_sums(const ActivationBwd& a, const XieluCoefficients<A>& own) {
  constexpr int kWarps = kElementThreads / kLanes;
  __shared__ A slots[kWarps * kCoefficients];
  const A values[kCoefficients] = {own.positive, own.negative, own.beta, own.eps};
  const int thread = int(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  const A mine = warp_sums<kCoefficients>(values, lane);
  constexpr int kSpan = kLanes / kCoefficients;
  if (lane % kSpan == 0) slots[warp * kCoefficients + lane / kSpan] = mine;
  __syncthreads();
  if (thread >= kCoefficients) return;
  A sum = 0;
  for (int i = 0; i < kWarps; ++i) sum += slots[i * kCoefficients + thread];
  static_cast<A*>(a.sums)[int64_t(blockIdx.x) * kCoefficients + thread] = sum;
}

// vectors: all tensors can be read and written 16 bytes at a time. Every input of a group is read
// before an output is written, since one may lie over the other.
template <typename T, Activation kAct, bool kGated, bool kAligned>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks<acc_t<T>>)
    activation_bwd_kernel(ActivationBwd a, const int64_t* rng_state, ElementGrid grid,
                          bool vectors) {
  using A = acc_t<T>;
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = dropout.template scale_as<A>();
  const auto coefficients = coefficients_of<kAct, A>(a);
  XieluCoefficients<A> sums{};
  for_groups(grid, [&](int64_t row, int64_t col, int count) {
    Raw<T, kGroup> raw_g, raw_u, raw_dh;
    raw_u.load(at<T>(a.u, row, col), count, vectors);
    raw_dh.load(at<T>(a.dh, row, col), count, vectors);
    if constexpr (kGated) raw_g.load(at<T>(a.g, row, col), count, vectors);
    const Philox4x32 draws = group_draws<kAligned>(a, dropout, row, col);
    // g becomes dg, u becomes du, and dh the gradient of h before dropout.
    A g[kGroup], u[kGroup], dh[kGroup], h[kGroup];
    raw_u.unpack(u);
    raw_dh.unpack(dh);
    if constexpr (kGated) raw_g.unpack(g);
    drop_group(dropout, draws, scale, dh);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const ActivationValue<A> act = activation_with_grad<kAct>(kGated ? g[i] : u[i], coefficients);
      if constexpr (kAct == Activation::xielu) {
        if (a.sums != nullptr && i < count) {
          const XieluCoefficients<A> own = xielu_grads(coefficients, u[i], dh[i]);
          sums.positive += own.positive;
          sums.negative += own.negative;
          sums.beta += own.beta;
          sums.eps += own.eps;
        }
      }
      if constexpr (kGated) {
        h[i] = act.value * u[i];
        g[i] = dh[i] * u[i] * act.grad;
        u[i] = dh[i] * act.value;
      } else {
        h[i] = act.value;
        u[i] = dh[i] * act.grad;
      }
    }
    drop_group(dropout, draws, scale, h);
    if (a.h.data != nullptr) store_group(h, count, vectors, at<T>(a.h, row, col));
    if (a.du.data != nullptr) store_group(u, count, vectors, at<T>(a.du, row, col));
    if constexpr (kGated) {
      if (a.dg.data != nullptr) store_group(g, count, vectors, at<T>(a.dg, row, col));
    }
  });
  if constexpr (kAct == Activation::xielu) {
    if (a.sums != nullptr) {
      sums.eps *= slope_of_eps(coefficients);
      store_sums(a, sums);
    }
  }
}

}  // namespace

const char* activation_bwd_cuda(const ActivationBwd& a, const int64_t* rng_state, int64_t rows,
                                void* stream) {
  const ElementGrid grid(rows, a.cols);
  if (grid.empty()) return nullptr;
  return for_type_and_activation(a, [&](auto t, auto act, auto gated) {
    using T = decltype(t);
    constexpr bool kGated = decltype(gated)::value;
    const bool vectors = whole_vectors<T>(a.u) && whole_vectors<T>(a.dh) && whole_vectors<T>(a.h) &&
                         whole_vectors<T>(a.du) &&
                         (!kGated || (whole_vectors<T>(a.g) && whole_vectors<T>(a.dg)));
    constexpr Activation kAct = decltype(act)::value;
    const auto kernel = a.col0 % kGroup == 0 ? activation_bwd_kernel<T, kAct, kGated, true>
                                             : activation_bwd_kernel<T, kAct, kGated, false>;
    return launch(kernel, grid.blocks(), dim3(kElementThreads), stream, a, rng_state, grid,
                  vectors);
  });
}

}  // namespace ckptfused
