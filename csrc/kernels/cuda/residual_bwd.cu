#include "kernels/cuda/norm_grad.cuh"
#include "kernels/cuda/residual.h"

namespace ckptfused {
namespace {

// df = m * drop(ds), without a post norm. df may be ds.
template <typename R, typename P>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks<acc_t<R>>)
    drop_grad_kernel(ResidualBwd a, const int64_t* rng_state, ElementGrid grid, bool vectors) {
  using A = acc_t<R>;
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = A(a.m) * dropout.template scale_as<A>();
  const auto load = [&](int64_t row, int64_t col, int count) {
    Raw<R, kGroup> raw;
    raw.load(static_cast<const R*>(a.ds) + row * a.cols + col, count, vectors);
    return raw;
  };
  for_loaded_groups(grid, load, [&](int64_t row, int64_t col, int count, const auto& raw) {
    A ds[kGroup];
    if (dropout.active()) {
      const Philox4x32 draws = dropout.draw(logical_row_of(a.row_map, row), col / kGroup);
      raw.unpack(ds);
      drop_group(dropout, draws, scale, ds);
    } else {
      raw.unpack(ds);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) ds[i] *= scale;
    }
    store_group(ds, count, vectors, static_cast<P*>(a.df) + row * a.cols + col);
  });
}

}  // namespace

const char* residual_bwd_cuda(const ResidualBwd& a, const int64_t* rng_state, int64_t rows,
                              int64_t chunks, void* dweight, void* dbias, void* stream) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) -> const char* {
    using R = decltype(r);
    using P = decltype(p);
    const bool vectors = whole_vectors<R>(a.ds, a.cols) && whole_vectors<P>(a.f, a.cols) &&
                         whole_vectors<P>(a.df, a.cols);
    if (a.post == NormKind::none) {
      if (dweight != nullptr || dbias != nullptr)
        return "without a post norm there are no parameters";
      const ElementGrid grid(rows, a.cols);
      if (grid.empty()) return nullptr;
      return launch(drop_grad_kernel<R, P>, grid.blocks(), dim3(kElementThreads), stream, a,
                    rng_state, grid, vectors);
    }
    NormGrad grad{};
    grad.kind = a.post;
    grad.eps = a.post_eps;
    grad.rows = rows;
    grad.cols = a.cols;
    grad.chunks = chunks;
    grad.vectors = vectors;
    grad.x = a.f;
    grad.dy = a.ds;
    grad.dx = a.df;
    grad.weight = a.post_weight;
    grad.dweight = dweight;
    grad.dbias = dbias;
    grad.m = a.m;
    grad.dropout = a.dropout;
    grad.row_map = a.row_map;
    return norm_grad_cuda<P, R, P, true>(grad, rng_state, stream);
  });
}

}  // namespace ckptfused
