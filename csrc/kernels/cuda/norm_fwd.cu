#include "kernels/cuda/norm.h"
#include "kernels/cuda/rows.cuh"

namespace ckptfused {
namespace {

template <typename R, typename P, int kSteps, int kThreads, typename W>
__global__ void __launch_bounds__(kThreads, kThreads == 512 ? 2 : 1)
    norm_fwd_kernel(NormFwd a, RowLayout layout, int64_t rows, bool vectors) {
  using A = acc_t<R>;
  const int64_t row = row_of_thread(layout);
  RowTeam team(layout, row < rows, a.cols);
  RowReader<R, kSteps> reader(static_cast<const R*>(a.x) + row * a.cols, vectors);
  P* y = static_cast<P*>(a.y) + row * a.cols;
  reader.load(team);
  const NormStats<A> stats =
      row_stats<kSteps>(team, a.kind, A(a.eps), [&](int step, A* x) { reader.get(team, step, x); });
  for_steps<kSteps>(team, [&](int step) {
    A x[kGroup];
    reader.get(team, step, x);
    apply_norm<W>(team, step, a.kind, stats, a.weight, a.bias, x);
    store_row_group<kSteps>(team, step, vectors, x, y);
  });
}

}  // namespace

const char* norm_fwd_cuda(const NormFwd& a, int64_t rows, void* stream) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) -> const char* {
    using R = decltype(r);
    using P = decltype(p);
    if (rows == 0 || a.cols == 0) return nullptr;
    if (a.cols > kMaxCols) return kTooWide;
    const bool vectors = whole_vectors<R>(a.x, a.cols) && whole_vectors<P>(a.y, a.cols);
    return for_forward_layout<R, P>(
        a.cols, vectors, {a.weight, a.bias},
        [&](RowLayout layout, auto steps, auto threads, auto w) {
          constexpr int kSteps = decltype(steps)::value, kThreads = decltype(threads)::value;
          return launch(norm_fwd_kernel<R, P, kSteps, kThreads, decltype(w)>,
                        grid_of(layout.blocks(rows)), dim3(layout.threads()), stream, a, layout,
                        rows, vectors);
        });
  });
}

}  // namespace ckptfused
