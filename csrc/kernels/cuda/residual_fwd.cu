#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/residual.h"
#include "kernels/cuda/rows.cuh"

namespace ckptfused {
namespace {

// sum = x + drop(f) * scale, rounded to R.
template <typename R, typename A>
__device__ __forceinline__ void add_group(const Dropout& dropout, const Philox4x32& draws, A scale,
                                          const A* x, const A* f, A* sum) {
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t draw = (draws.word[i >> 1] >> (16 * (i & 1))) & 0xffffu;
    const bool keep = draw >= dropout.threshold;
    sum[i] = round_to<R>(keep ? std::fma(f[i], scale, x[i]) : x[i] + A(0));
  }
}

template <typename R, typename P, int kSteps, typename W>
__global__ void __launch_bounds__(kSteps > 0 ? kMaxTeam<R> : 256, 1)
    residual_fwd_kernel(ResidualFwd a, const int64_t* rng_state, RowLayout layout, int64_t rows,
                        bool vectors) {
  using A = acc_t<R>;
  const int64_t row = row_of_thread(layout), first = row * a.cols;
  RowTeam team(layout, row < rows, a.cols);
  RowReader<R, kSteps> x_reader(static_cast<const R*>(a.x) + first, vectors);
  RowReader<P, kSteps> f_reader(static_cast<const P*>(a.f) + first, vectors);
  f_reader.load(team);
  x_reader.load(team);
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = A(a.m) * dropout.template scale_as<A>();
  const int64_t logical_row = dropout.active() ? logical_row_of(a.row_map, row) : 0;
  const NormStats<A> post = row_stats<kSteps>(team, a.post, A(a.post_eps),
                                              [&](int step, A* f) { f_reader.get(team, step, f); });

  const auto make_sum = [&](int step, A* sum) {
    A f[kGroup], x[kGroup];
    f_reader.get(team, step, f);
    x_reader.get(team, step, x);
    if (a.post != NormKind::none) {
      apply_norm<W>(team, step, a.post, post, a.post_weight, a.post_bias, f);
    }
    Philox4x32 draws = {};
    if (dropout.active()) draws = dropout.draw(logical_row, team.col(step) / kGroup);
    add_group<R>(dropout, draws, scale, x, f, sum);
  };
  // The sum takes the place of x in the registers, as it lies in memory. Where a row is not held,
  // it is read again, or made again if it is not stored.
  R* sum_row = a.sum == nullptr ? nullptr : static_cast<R*>(a.sum) + first;
  if (kSteps > 0 || sum_row != nullptr) {
    for_steps<kSteps>(team, [&](int step) {
      A sum[kGroup];
      make_sum(step, sum);
      if (sum_row != nullptr) store_row_group<kSteps>(team, step, vectors, sum, sum_row);
      if constexpr (kSteps > 0) {
        if (team.count(step) > 0) x_reader.hold(step, sum);
      }
    });
  }
  if (a.normed == nullptr) return;

  const auto get_sum = [&](int step, A* sum) {
    if (kSteps > 0) {
      x_reader.get(team, step, sum);
    } else if (sum_row != nullptr) {
      load_group(sum_row + team.col(step), team.count(step), vectors, sum);
    } else {
      make_sum(step, sum);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) sum[i] = i < team.count(step) ? sum[i] : A(0);
    }
  };
  const NormStats<A> next = row_stats<kSteps>(team, a.next, A(a.next_eps), get_sum);
  for_steps<kSteps>(team, [&](int step) {
    A sum[kGroup];
    get_sum(step, sum);
    apply_norm<W>(team, step, a.next, next, a.next_weight, a.next_bias, sum);
    if (a.normed_dtype == a.p) {
      store_row_group<kSteps>(team, step, vectors, sum, static_cast<P*>(a.normed) + first);
    } else {
      store_row_group<kSteps>(team, step, vectors, sum, static_cast<R*>(a.normed) + first);
    }
  });
}

}  // namespace

const char* residual_fwd_cuda(const ResidualFwd& a, const int64_t* rng_state, int64_t rows,
                              void* stream) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) -> const char* {
    using R = decltype(r);
    using P = decltype(p);
    if (a.normed != nullptr && a.normed_dtype != a.r && a.normed_dtype != a.p) {
      return "normed has neither the rows' dtype nor the compute dtype";
    }
    if (rows == 0 || a.cols == 0) return nullptr;
    if (a.cols > kMaxCols) return kTooWide;
    const bool vectors = whole_vectors<R>(a.x, a.cols) && whole_vectors<P>(a.f, a.cols) &&
                         whole_vectors<R>(a.sum, a.cols) &&
                         (a.normed_dtype == a.p ? whole_vectors<P>(a.normed, a.cols)
                                                : whole_vectors<R>(a.normed, a.cols));
    return for_forward_layout<R, P>(
        a.cols, vectors, {a.post_weight, a.post_bias, a.next_weight, a.next_bias},
        [&](RowLayout layout, auto steps, auto /*threads*/, auto w) {
          return launch(residual_fwd_kernel<R, P, decltype(steps)::value, decltype(w)>,
                        grid_of(layout.blocks(rows)), dim3(layout.threads()), stream, a, rng_state,
                        layout, rows, vectors);
        });
  });
}

}  // namespace ckptfused
