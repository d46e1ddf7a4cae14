#include "kernels/cuda/norm.h"
#include "kernels/cuda/norm_grad.cuh"

namespace ckptfused {
namespace {

// dx = (dres or 0) + dy: the gradient of kind none, which converts. -0 changes no number when
// added.
template <typename R, typename P>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks<acc_t<R>>)
    add_grad_kernel(NormBwd a, ElementGrid grid, bool vectors) {
  using A = acc_t<R>;
  struct Loaded {
    Raw<P, kGroup> dy;
    Raw<R, kGroup> dres;
  };
  const auto load = [&](int64_t row, int64_t col, int count) {
    const int64_t at = row * a.cols + col;
    Loaded raw;
    raw.dy.load(static_cast<const P*>(a.dy) + at, count, vectors);
    if (a.dres != nullptr) raw.dres.load(static_cast<const R*>(a.dres) + at, count, vectors);
    return raw;
  };
  for_loaded_groups(grid, load, [&](int64_t row, int64_t col, int count, const Loaded& raw) {
    A dy[kGroup], dres[kGroup];
    raw.dy.unpack(dy);
    raw.dres.unpack(dres);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) dy[i] += a.dres != nullptr ? dres[i] : A(-0.0);
    store_group(dy, count, vectors, static_cast<R*>(a.dx) + row * a.cols + col);
  });
}

}  // namespace

const char* norm_bwd_cuda(const NormBwd& a, int64_t rows, int64_t chunks, void* dweight,
                          void* dbias, void* stream) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) -> const char* {
    using R = decltype(r);
    using P = decltype(p);
    const bool vectors = whole_vectors<P>(a.dy, a.cols) && whole_vectors<R>(a.x, a.cols) &&
                         whole_vectors<R>(a.dres, a.cols) && whole_vectors<R>(a.dx, a.cols);
    if (a.kind == NormKind::none) {
      if (dweight != nullptr || dbias != nullptr) return "kind none has no parameters";
      const ElementGrid grid(rows, a.cols);
      if (grid.empty() || a.dx == nullptr) return nullptr;
      return launch(add_grad_kernel<R, P>, grid.blocks(), dim3(kElementThreads), stream, a, grid,
                    vectors);
    }
    NormGrad grad{};
    grad.kind = a.kind;
    grad.eps = a.eps;
    grad.rows = rows;
    grad.cols = a.cols;
    grad.chunks = chunks;
    grad.vectors = vectors;
    grad.x = a.x;
    grad.dy = a.dy;
    grad.dres = a.dres;
    grad.dx = a.dx;
    grad.weight = a.weight;
    grad.dweight = dweight;
    grad.dbias = dbias;
    return norm_grad_cuda<R, P, R, false>(grad, nullptr, stream);
  });
}

}  // namespace ckptfused
