#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/rows.cuh"

// The gradient of a norm, which norm_bwd and residual_bwd share.

namespace ckptfused {

// dx = (dres or 0) + J^T dy for x of type X, dy of type G, dx of type D; with dropout (or m != 1),
// dy is taken times m * drop first. A block takes a chunk of consecutive rows and leaves its share
// of the parameters' gradients, acc [chunks, cols], in dweight and dbias.
struct NormGrad {
  NormKind kind;
  double eps;
  int64_t rows, cols, chunks;
  bool vectors;
  const void *x, *dy, *dres;
  void* dx;
  NormParam weight;
  void *dweight, *dbias;
  double m;
  Dropout dropout;
  RowMap row_map;
};

// What a block keeps of dweight or dbias: the thread's own columns, in registers or, where rows are
// not held, in memory.
template <typename A, int kSteps>
struct ColumnSums {
  A held[kSteps > 0 ? kSteps : 1][kGroup] = {};

  // The block's row of partials [chunks, cols].
  static __device__ __forceinline__ A* row(void* partials, int64_t cols) {
    return static_cast<A*>(partials) + int64_t(blockIdx.x) * cols;
  }
  // += a * b; first: of the block's rows.
  __device__ __forceinline__ void add(const RowTeam& team, int step, void* partials, int64_t cols,
                                      bool first, const A* a, const A* b) {
    if constexpr (kSteps > 0) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) held[step][i] = std::fma(a[i], b[i], held[step][i]);
    } else if (partials != nullptr) {
      const int count = team.count(step);
      A* to = row(partials, cols) + team.col(step);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) to[i] = std::fma(a[i], b[i], first ? A(0) : to[i]);
      }
    }
  }
  // empty: there was no row.
  __device__ __forceinline__ void finish(const RowTeam& team, void* partials, int64_t cols,
                                         bool empty) {
    if (partials == nullptr || (kSteps == 0 && !empty)) return;
    A* to = row(partials, cols);
    for_steps<kSteps>(team, [&](int step) {
      const bool vectors = kSteps > 0 && whole_vectors<A>(to, kGroup);
      store_group(held[kSteps > 0 ? step : 0], team.count(step), vectors, to + team.col(step));
    });
  }
};

constexpr int kGradThreads = 512;  // at most, where rows are held: 128 registers each

// kPlain: the norm has no mean, and dbias is not asked for. kDrop: whether dy is scaled or dropped.
template <typename X, typename G, typename D, int kSteps, bool kPlain, bool kDrop>
__global__ void __launch_bounds__(kSteps > 0 ? kGradThreads : 256, 1)
    norm_grad_kernel(NormGrad a, const int64_t* rng_state, RowLayout layout) {
  using A = acc_t<X>;
  RowTeam team = row_team(layout, a.cols);
  const int64_t begin = a.rows * blockIdx.x / a.chunks;
  const int64_t end = a.rows * (blockIdx.x + int64_t(1)) / a.chunks;
  const A inv_n = A(1) / A(a.cols);
  const bool centred = !kPlain && norm_is_centred(a.kind);
  const Dropout dropout = kDrop ? with_state(a.dropout, rng_state) : Dropout{};
  const A scale = kDrop ? A(a.m) * dropout.template scale_as<A>() : A(1);
  const NormParams<A, kSteps, (kSteps > 0), true> params(team, a.kind, a.weight, {});
  ColumnSums<A, kSteps> dweight, dbias;

  // The next row is on its way while one is worked on. Floats, or what a mean and a bias need,
  // would take too many registers for that.
  constexpr bool kAhead = sizeof(X) == 2 && sizeof(G) == 2 && kPlain;
  RowLoad<X, kSteps> x_next(a.vectors);
  RowLoad<G, kSteps> dy_next(a.vectors);
  const auto load_next = [&](int64_t at) {
    if (!kAhead) x_next = RowLoad<X, kSteps>(a.vectors), dy_next = RowLoad<G, kSteps>(a.vectors);
    x_next.start(team, a.x, at);
    dy_next.start(team, a.dy, at);
  };
  int64_t at = begin * a.cols + team.col(0);  // the thread's first element of the row
  if (kAhead && begin < end) load_next(at);
  for (int left = int(end - begin); left > 0; --left, at += a.cols) {
    if (!kAhead) load_next(at);
    const auto x_row = x_next.finish();
    auto dy_row = dy_next.finish();
    if (left > 1) {
      if (kAhead) {
        load_next(at + a.cols);
      } else {
        x_next.expect(team, a.x, at + a.cols);
        dy_next.expect(team, a.dy, at + a.cols);
      }
    }
    RowLoad<D, kSteps> dres(a.vectors);
    const bool add_dres = !kDrop && a.dres != nullptr;
    if (kPlain && add_dres) dres.start(team, a.dres, at);
    const int64_t logical_row =
        kDrop && dropout.active() ? logical_row_of(a.row_map, end - left) : 0;
    const auto drop = [&](int step, A* dy) {
      if (!dropout.active()) {
        CKPT_UNROLL
        for (int i = 0; i < kGroup; ++i) dy[i] *= scale;
        return;
      }
      drop_group(dropout, dropout.draw(logical_row, team.col(step) / kGroup), scale, dy);
    };
    if constexpr (kDrop) {
      CKPT_UNROLL
      for (int step = 0; step < kSteps; ++step) drop(step, dy_row.held[step]);
    }
    const auto get = [&](int step, A* x, A* dy, A* gain) {
      x_row.get(team, step, x);
      dy_row.get(team, step, dy);
      if (kDrop && kSteps == 0) drop(step, dy);
      params.get_gain(team, step, gain);
    };
    // Two sums at a time: of x and g = dy * gain, then of the squares of d = x - mean and of g * d.
    A mean = 0, mean_g = 0, sums[2];
    if (centred) {
      row_sums<kSteps, 2>(team, sums, [&](int step, A* value) {
        A x[kGroup], dy[kGroup], gain[kGroup];
        get(step, x, dy, gain);
        value[0] = group_sum(x);
        value[1] = 0;
        CKPT_UNROLL
        for (int i = 0; i < kGroup; ++i) value[1] = std::fma(dy[i], gain[i], value[1]);
      });
      mean = mul_rn(sums[0], inv_n), mean_g = mul_rn(sums[1], inv_n);
    }
    row_sums<kSteps, 2>(team, sums, [&](int step, A* value) {
      A x[kGroup], dy[kGroup], gain[kGroup];
      get(step, x, dy, gain);
      value[0] = row_squares<kSteps, kPlain>(team, step, x, mean);
      value[1] = 0;
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        value[1] = std::fma(mul_rn(dy[i], gain[i]), x[i] - mean, value[1]);
      }
    });
    if (!kPlain && add_dres) dres.start(team, a.dres, at);  // no registers before
    NormStats<A> stats = make_norm_stats(mean, mul_rn(sums[0], inv_n), A(a.eps));
    A mean_gx = mul_rn(stats.rstd, mul_rn(sums[1], inv_n));
    if constexpr (kPlain || kSteps == 0) {  // LayerScale comes to no other
      if (!norm_has_stats(a.kind)) stats = {A(0), A(1)}, mean_gx = A(0);
    }

    for_steps<kSteps>(team, [&](int step) {
      A x[kGroup], dy[kGroup], gain[kGroup], dx[kGroup];
      get(step, x, dy, gain);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        x[i] = normalised(x[i], stats);
        dx[i] = A(-0.0);
      }
      const bool first = left == end - begin;
      dweight.add(team, step, a.dweight, a.cols, first, dy, x);
      if constexpr (!kPlain) {
        const A ones[kGroup] = {A(1), A(1), A(1), A(1), A(1), A(1), A(1), A(1)};
        dbias.add(team, step, a.dbias, a.cols, first, dy, ones);
      }
      if (a.dx == nullptr) return;
      if (add_dres) dres.get(team, step, dx);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const A g = kPlain ? mul_rn(dy[i], gain[i]) : std::fma(dy[i], gain[i], -mean_g);
        dx[i] = std::fma(stats.rstd, std::fma(-x[i], mean_gx, g), dx[i]);
      }
      store_row_group<kSteps>(team, step, a.vectors, dx, static_cast<D*>(a.dx) + at);
    });
  }
  dweight.finish(team, a.dweight, a.cols, begin == end);
  if constexpr (!kPlain) dbias.finish(team, a.dbias, a.cols, begin == end);
}

template <typename X, typename G, typename D, bool kDrop>
const char* norm_grad_cuda(const NormGrad& a, const int64_t* rng_state, void* stream) {
  using A = acc_t<X>;
  if (a.chunks < 1) return "a gradient needs at least one chunk of rows";
  const bool no_params = a.dweight == nullptr && a.dbias == nullptr;
  if (a.cols == 0 || (no_params && (a.rows == 0 || a.dx == nullptr))) return nullptr;
  if (a.cols > kMaxCols) return kTooWide;
  const int64_t warps = (a.cols + kWarpColumns - 1) / kWarpColumns;
  const auto run = [&](int most_warps, auto steps, auto plain) {
    constexpr int kSteps = decltype(steps)::value;
    const int64_t team_warps = kSteps > 0 ? (warps + kSteps - 1) / kSteps : warps;
    const RowLayout layout{kSteps, kLanes * int(team_warps < most_warps ? team_warps : most_warps),
                           1};
    return launch(norm_grad_kernel<X, G, D, kSteps, decltype(plain)::value, kDrop>,
                  grid_of(a.chunks), dim3(layout.threads()), stream, a, rng_state, layout);
  };
  if constexpr (sizeof(A) == sizeof(float)) {
    constexpr int kMostWarps = kGradThreads / kLanes;
    const bool plain = a.dbias == nullptr && norm_is_plain(a.kind, {});
    const bool held = plain || norm_has_stats(a.kind);
    if (held && a.vectors && a.cols % kGroup == 0 && warps <= 2 * kMostWarps) {
      const std::integral_constant<int, 2> two;
      return plain ? run(kMostWarps, two, std::true_type{})
                   : run(kMostWarps, two, std::false_type{});
    }
  }
  return run(8, std::integral_constant<int, 0>{}, std::false_type{});
}

}  // namespace ckptfused
