#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/activation.h"

namespace ckptfused {
namespace {

// vectors: all tensors can be read and written 16 bytes at a time.
template <typename T, Activation kAct, bool kGated, bool kAligned>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks<acc_t<T>>)
    activation_fwd_kernel(ActivationFwd a, const int64_t* rng_state, ElementGrid grid,
                          bool vectors) {
  using A = acc_t<T>;
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = dropout.template scale_as<A>();
  const auto coefficients = coefficients_of<kAct, A>(a);
  struct Loaded {
    Raw<T, kGroup> g, u;
  };
  const auto load = [&](int64_t row, int64_t col, int count) {
    Loaded raw;
    raw.u.load(at<T>(a.u, row, col), count, vectors);
    if constexpr (kGated) raw.g.load(at<T>(a.g, row, col), count, vectors);
    return raw;
  };
  for_loaded_groups(grid, load, [&](int64_t row, int64_t col, int count, const Loaded& raw) {
    const Philox4x32 draws = group_draws<kAligned>(a, dropout, row, col);
    A g[kGroup], u[kGroup], h[kGroup];
    raw.u.unpack(u);
    if constexpr (kGated) raw.g.unpack(g);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if constexpr (kGated) {
        h[i] = activation_value<kAct>(g[i], coefficients) * u[i];
      } else {
        h[i] = activation_value<kAct>(u[i], coefficients);
      }
    }
    drop_group(dropout, draws, scale, h);
    store_group(h, count, vectors, at<T>(a.h, row, col));
  });
}

}  // namespace

const char* activation_fwd_cuda(const ActivationFwd& a, const int64_t* rng_state, int64_t rows,
                                void* stream) {
  const ElementGrid grid(rows, a.cols);
  if (grid.empty()) return nullptr;
  return for_type_and_activation(a, [&](auto t, auto act, auto gated) {
    using T = decltype(t);
    constexpr bool kGated = decltype(gated)::value;
    const bool vectors =
        whole_vectors<T>(a.u) && whole_vectors<T>(a.h) && (!kGated || whole_vectors<T>(a.g));
    constexpr Activation kAct = decltype(act)::value;
    const auto kernel = a.col0 % kGroup == 0 ? activation_fwd_kernel<T, kAct, kGated, true>
                                             : activation_fwd_kernel<T, kAct, kGated, false>;
    return launch(kernel, grid.blocks(), dim3(kElementThreads), stream, a, rng_state, grid,
                  vectors);
  });
}

}  // namespace ckptfused
