#include "kernels/cuda/norm.h"
#include "kernels/cuda/rows.cuh"

namespace ckptfused {
namespace {

template <typename R, typename P, int kSteps, bool kPlain>
__global__ void __launch_bounds__(kMaxTeam<R, kSteps, kPlain>, kSteps > 0 ? 1 : 2)
    norm_fwd_kernel(NormFwd a, RowLayout layout, int64_t rows, bool vectors) {
  using A = acc_t<R>;
  RowTeam team = row_team(layout, a.cols);
  const A inv_n = A(1) / A(a.cols);
  const NormParams<A, kSteps, (kSteps > 0), kPlain> params(team, a.kind, a.weight, a.bias);
  RowLoad<R, kSteps> next(vectors);
  const int64_t rows_on = int64_t(gridDim.x) * layout.rows, on = rows_on * a.cols;
  int64_t row = first_row(layout), at = row * a.cols + team.col(0);
  if (row < rows) next.start(team, a.x, at);
  for (; row < rows; row += rows_on, at += on) {
    const auto x_row = next.finish();
    if (row + rows_on < rows) next.start(team, a.x, at + on);
    const auto get = [&](int step, A* x) { x_row.get(team, step, x); };
    const NormStats<A> stats = row_stats<kSteps, kPlain>(team, a.kind, inv_n, A(a.eps), get);
    for_steps<kSteps>(team, [&](int step) {
      A x[kGroup];
      get(step, x);
      params.apply(team, step, stats, x);
      store_row_group<kSteps>(team, step, vectors, x, static_cast<P*>(a.y) + at);
    });
  }
}

}  // namespace

const char* norm_fwd_cuda(const NormFwd& a, int64_t rows, int64_t multiprocessors, void* stream) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) -> const char* {
    using R = decltype(r);
    using P = decltype(p);
    if (rows == 0 || a.cols == 0) return nullptr;
    if (a.cols > kMaxCols) return kTooWide;
    const bool vectors = whole_vectors<R>(a.x, a.cols) && whole_vectors<P>(a.y, a.cols);
    const bool plain = norm_is_plain(a.kind, a.bias);
    return for_forward_layout<R, false>(
        a.cols, vectors, plain, plain ? kMaxTeam<R, 2, true> : kMaxTeam<R, 2, false>,
        [&](RowLayout layout, auto steps, auto plain) {
          constexpr int kSteps = decltype(steps)::value;
          constexpr bool kPlain = decltype(plain)::value;
          constexpr int kThreads = kRowThreads<R, kSteps, kPlain>;
          return launch(norm_fwd_kernel<R, P, kSteps, kPlain>,
                        row_grid(layout, rows, kThreads, multiprocessors), dim3(layout.threads()),
                        stream, a, layout, rows, vectors);
        });
  });
}

}  // namespace ckptfused
