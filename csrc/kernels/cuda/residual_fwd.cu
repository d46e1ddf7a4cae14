#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/residual.h"
#include "kernels/cuda/rows.cuh"

namespace ckptfused {
namespace {

// sum = x + drop(f) * scale, rounded to R.
template <typename R, typename A>
__device__ __forceinline__ void add_group(const Dropout& dropout, int64_t logical_row, int64_t col,
                                          A scale, const A* x, const A* f, A* sum) {
  if (dropout.active()) {
    const Philox4x32 draws = dropout.draw(logical_row, col / kGroup);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      sum[i] = round_to<R>(kept(dropout, draws, i) ? std::fma(f[i], scale, x[i]) : x[i] + A(0));
    }
  } else {
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) sum[i] = round_to<R>(std::fma(f[i], scale, x[i]));
  }
}

// kPost: there may be a norm of f. kPlain: all norms that there are have no mean and no bias.
template <typename R, typename P, int kSteps, bool kPost, bool kPlain>
__global__ void __launch_bounds__(kMaxTeam<R, kSteps, false>, 1)
    residual_fwd_kernel(ResidualFwd a, const int64_t* rng_state, RowLayout layout, int64_t rows,
                        bool vectors) {
  using A = acc_t<R>;
  RowTeam team = row_team(layout, a.cols);
  const A inv_n = A(1) / A(a.cols);
  const Dropout dropout = with_state(a.dropout, rng_state);
  const A scale = A(a.m) * dropout.template scale_as<A>();
  constexpr bool kHeld = kSteps > 0;
  const NormParams<A, kSteps, kHeld, kPlain> next_params(team, a.next, a.next_weight, a.next_bias);
  const NormParams<A, kSteps, kPost && kHeld, kPlain> post_params(team, a.post, a.post_weight,
                                                                  a.post_bias);
  constexpr bool kAhead = sizeof(R) == 2 && kSteps != kWideSteps;
  RowLoad<R, kSteps> x_next(vectors);
  RowLoad<P, kSteps> f_next(vectors);
  const auto load_next = [&](int64_t at) {
    if (!kAhead) x_next = RowLoad<R, kSteps>(vectors), f_next = RowLoad<P, kSteps>(vectors);
    f_next.start(team, a.f, at);
    x_next.start(team, a.x, at);
  };
  const int64_t rows_on = int64_t(gridDim.x) * layout.rows, on = rows_on * a.cols;
  int64_t row = first_row(layout), at = row * a.cols + team.col(0);
  if (kAhead && row < rows) load_next(at);
  for (; row < rows; row += rows_on, at += on) {
    if (!kAhead) load_next(at);
    auto x_row = x_next.finish();
    const auto f_row = f_next.finish();
    if (row + rows_on < rows) {
      if (kAhead) {
        load_next(at + on);
      } else {
        f_next.expect(team, a.f, at + on);
        x_next.expect(team, a.x, at + on);
      }
    }
    const int64_t logical_row = dropout.active() ? logical_row_of(a.row_map, row) : 0;
    NormStats<A> post{A(0), A(1)};
    if constexpr (kPost) {
      const auto get_f = [&](int step, A* f) { f_row.get(team, step, f); };
      post = row_stats<kSteps, kPlain>(team, a.post, inv_n, A(a.post_eps), get_f);
    }
    const auto make_sum = [&](int step, A* sum) {
      A f[kGroup], x[kGroup];
      f_row.get(team, step, f);
      x_row.get(team, step, x);
      if (kPost && (kPlain || a.post != NormKind::none)) post_params.apply(team, step, post, f);
      add_group<R>(dropout, logical_row, team.col(step), scale, x, f, sum);
    };
    // The sum takes the place of x in the registers, as it lies in memory. Where a row is not held,
    // it is read again, or made again if it is not stored.
    R* sum_row = a.sum == nullptr ? nullptr : static_cast<R*>(a.sum) + at;
    if (kSteps > 0 || sum_row != nullptr) {
      for_steps<kSteps>(team, [&](int step) {
        A sum[kGroup];
        make_sum(step, sum);
        if (sum_row != nullptr) store_row_group<kSteps>(team, step, vectors, sum, sum_row);
        if constexpr (kSteps > 0) x_row.hold(step, sum);
      });
    }
    if (a.normed == nullptr) continue;

    const auto get_sum = [&](int step, A* sum) {
      if (kSteps > 0) {
        x_row.get(team, step, sum);
      } else if (sum_row != nullptr) {
        load_group(sum_row + team.offset(step), team.count(step), vectors, sum);
      } else {
        make_sum(step, sum);
        CKPT_UNROLL
        for (int i = 0; i < kGroup; ++i) sum[i] = i < team.count(step) ? sum[i] : A(0);
      }
    };
    const NormStats<A> next =
        row_stats<kSteps, kPlain>(team, a.next, inv_n, A(a.next_eps), get_sum);
    for_steps<kSteps>(team, [&](int step) {
      A sum[kGroup];
      get_sum(step, sum);
      next_params.apply(team, step, next, sum);
      if (a.normed_dtype == a.p) {
        store_row_group<kSteps>(team, step, vectors, sum, static_cast<P*>(a.normed) + at);
      } else {
        store_row_group<kSteps>(team, step, vectors, sum, static_cast<R*>(a.normed) + at);
      }
    });
  }
}

}  // namespace

const char* residual_fwd_cuda(const ResidualFwd& a, const int64_t* rng_state, int64_t rows,
                              int64_t multiprocessors, void* stream) {
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
    const bool has_post = a.post != NormKind::none;
    const bool plain = (!has_post || norm_is_plain(a.post, a.post_bias)) &&
                       (a.normed == nullptr || norm_is_plain(a.next, a.next_bias));
    // Registers do not hold weights and biases of two norms beside the rows.
    const auto run = [&](RowLayout layout, auto steps, auto plain, auto post) -> const char* {
      constexpr int kSteps = decltype(steps)::value;
      constexpr bool kPlain = decltype(plain)::value, kPost = decltype(post)::value;
      if constexpr (kPost && kSteps > 0 && !kPlain) {
        return "two norms with means or biases are not held in registers";
      } else {
        constexpr int kThreads = kRowThreads<R, kSteps, false>;
        return launch(residual_fwd_kernel<R, P, kSteps, kPost, kPlain>,
                      row_grid(layout, rows, kThreads, multiprocessors), dim3(layout.threads()),
                      stream, a, rng_state, layout, rows, vectors);
      }
    };
    constexpr int kMost = kMaxTeam<R, 2, false>;
    if (has_post) {
      return for_forward_layout<R, false>(a.cols, vectors && plain, plain, kMost,
                                          [&](RowLayout layout, auto steps, auto plain) {
                                            return run(layout, steps, plain, std::true_type{});
                                          });
    }
    return for_forward_layout<R, true>(
        a.cols, vectors, plain, kMost, [&](RowLayout layout, auto steps, auto plain) {
          // One kernel for rows that are not held.
          return run(layout, steps, plain, std::bool_constant < decltype(steps)::value == 0 > {});
        });
  });
}

}  // namespace ckptfused
