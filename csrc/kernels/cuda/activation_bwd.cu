#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/activation.h"

namespace ckptfused {
namespace {

// vectors: all tensors can be read and written 16 bytes at a time. Every input of a group is read
// before an output is written, since one may lie over the other.
template <typename T, Activation kAct, bool kGated, bool kAligned>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks<acc_t<T>>)
    activation_bwd_kernel(ActivationBwd a, const int64_t* rng_state, ElementGrid grid,
                          bool vectors) {
  using A = acc_t<T>;
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = dropout.template scale_as<A>();
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
      const ActivationValue<A> act = activation_with_grad<kAct>(kGated ? g[i] : u[i]);
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
