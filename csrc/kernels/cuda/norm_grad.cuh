#pragma once

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/partials.cuh"
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
  A* row;
  A held[kSteps > 0 ? kSteps : 1][kGroup];

  __device__ __forceinline__ explicit ColumnSums(void* partials, int64_t cols)
      : row(partials == nullptr ? nullptr : static_cast<A*>(partials) + int64_t(blockIdx.x) * cols),
        held() {}
  // += a * b
  __device__ __forceinline__ void add(const RowTeam& team, int step, bool first, const A* a,
                                      const A* b) {
    if constexpr (kSteps > 0) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) held[step][i] = std::fma(a[i], b[i], held[step][i]);
    } else if (row != nullptr) {
      const int count = team.count(step);
      A* to = row + team.col(step);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (i < count) to[i] = std::fma(a[i], b[i], first ? A(0) : to[i]);
      }
    }
  }
  // empty: there was no row.
  __device__ __forceinline__ void finish(const RowTeam& team, bool empty) {
    if (row == nullptr || (kSteps == 0 && !empty)) return;
    for_steps<kSteps>(team, [&](int step) {
      const bool vectors = kSteps > 0 && whole_vectors<A>(row, kGroup);
      store_group(held[kSteps > 0 ? step : 0], team.count(step), vectors, row + team.col(step));
    });
  }
};

constexpr int kGradThreads = 512;  // at most, where rows are held: 128 registers each

// kBias: whether dbias may be asked for. kDrop: whether dy is scaled or dropped.
template <typename X, typename G, typename D, int kSteps, typename W, bool kBias, bool kDrop>
__global__ void __launch_bounds__(kSteps > 0 ? kGradThreads : 256, 1)
    norm_grad_kernel(NormGrad a, const int64_t* rng_state, RowLayout layout) {
  using A = acc_t<X>;
  RowTeam team(layout, true, a.cols);
  const int64_t chunk = blockIdx.x;
  const int64_t begin = a.rows * chunk / a.chunks, end = a.rows * (chunk + 1) / a.chunks;
  const A n = A(a.cols);
  const bool centred = norm_is_centred(a.kind);
  const Dropout dropout = kDrop ? with_state(a.dropout, rng_state) : Dropout{};
  const A scale = kDrop ? A(a.m) * dropout.template scale_as<A>() : A(1);

  // The weight as it lies in memory; without one it is 0 + 1, and -0 changes nothing when added.
  using Weight = std::conditional_t<kSteps == 0, A, W>;
  RowReader<Weight, kSteps> weight(static_cast<const Weight*>(a.weight.data), true);
  weight.clear();
  if (kSteps > 0 && weight.row != nullptr) weight.load(team);
  const A gain_offset = weight.row == nullptr || a.kind == NormKind::gemma ? A(1) : A(-0.0);
  const auto get_gain = [&](int step, A* gain) {
    if constexpr (kSteps > 0) {
      weight.get(team, step, gain);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) gain[i] += gain_offset;
    } else {
      load_gain<W>(a.kind, a.weight, team.col(step), team.count(step), gain);
    }
  };
  ColumnSums<A, kSteps> dweight(a.dweight, a.cols), dbias(kBias ? a.dbias : nullptr, a.cols);

  // The next row is on its way while one is worked on; floats, or dropout beside a bias, would
  // take too many registers for that.
  constexpr bool kHalf = std::is_same_v<X, f16>;  // its conversions take more registers than bf16's
  constexpr bool kAhead = sizeof(X) == 2 && sizeof(G) == 2 && !(kBias && (kDrop || kHalf));
  RowReader<X, kSteps> x_next(nullptr, a.vectors);
  RowReader<G, kSteps> dy_next(nullptr, a.vectors);
  const auto load_next = [&](int64_t first) {
    x_next.row = static_cast<const X*>(a.x) + first;
    dy_next.row = static_cast<const G*>(a.dy) + first;
    x_next.load(team);
    dy_next.load(team);
  };
  int64_t first = begin * a.cols;  // element of the row
  if (kAhead && begin < end) load_next(first);
  for (int left = int(end - begin); left > 0; --left, first += a.cols) {
    if (!kAhead) load_next(first);
    const auto x_reader = x_next;
    const auto dy_reader = dy_next;
    if (kAhead && left > 1) load_next(first + a.cols);
    RowReader<D, kSteps> dres(static_cast<const D*>(a.dres) + first, a.vectors);
    if (a.dres != nullptr) dres.load(team);
    const int64_t logical_row =
        kDrop && dropout.active() ? logical_row_of(a.row_map, end - left) : 0;
    const auto get_dy = [&](int step, A* dy) {
      dy_reader.get(team, step, dy);
      if constexpr (kDrop) {
        if (dropout.active()) {
          const Philox4x32 draws = dropout.draw(logical_row, team.col(step) / kGroup);
          drop_group(dropout, draws, scale, dy);
        } else {
          CKPT_UNROLL
          for (int i = 0; i < kGroup; ++i) dy[i] *= scale;
        }
      }
    };
    // Two sums at a time: of x and g = dy * gain, then of the squares of d = x - mean and of g * d.
    A mean = 0, mean_g = 0, sums[2];
    CKPT_NO_UNROLL
    for (int pass = centred ? 0 : 1; pass < 2; ++pass) {
      row_sums<kSteps, 2>(team, sums, [&](int step, A* value) {
        A x[kGroup], dy[kGroup], gain[kGroup];
        x_reader.get(team, step, x);
        get_dy(step, dy);
        get_gain(step, gain);
        value[0] = pass == 0 ? group_sum(x) : group_squares(x, mean, team.count(step));
        value[1] = 0;
        CKPT_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          const A factor = pass == 0 ? dy[i] : dy[i] * (x[i] - mean);
          value[1] = std::fma(factor, gain[i], value[1]);
        }
      });
      if (pass == 0) mean = sums[0] / n, mean_g = sums[1] / n;
    }
    const NormStats<A> stats = make_norm_stats(mean, sums[0] / n, A(a.eps));
    const A mean_gx = stats.rstd * (sums[1] / n);

    for_steps<kSteps>(team, [&](int step) {
      A x[kGroup], dy[kGroup], gain[kGroup], ones[kGroup], dx[kGroup];
      x_reader.get(team, step, x);
      get_dy(step, dy);
      get_gain(step, gain);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        x[i] = normalised(x[i], stats);
        ones[i] = A(1);
        dx[i] = A(-0.0);
      }
      dweight.add(team, step, first == begin * a.cols, dy, x);
      if constexpr (kBias) dbias.add(team, step, first == begin * a.cols, dy, ones);
      if (a.dx == nullptr) return;
      if (a.dres != nullptr) dres.get(team, step, dx);
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const A inner = std::fma(-x[i], mean_gx, std::fma(dy[i], gain[i], -mean_g));
        dx[i] = std::fma(stats.rstd, inner, dx[i]);
      }
      store_row_group<kSteps>(team, step, a.vectors, dx, static_cast<D*>(a.dx) + first);
    });
  }
  dweight.finish(team, begin == end);
  if constexpr (kBias) dbias.finish(team, begin == end);
}

// Launches the kernel and the sum of what its blocks leave. dweight, dbias: [cols] acc or null.
template <typename X, typename G, typename D, bool kDrop>
const char* norm_grad_cuda(const NormGrad& a, const int64_t* rng_state, void* dweight, void* dbias,
                           void* stream) {
  using A = acc_t<X>;
  using P = std::conditional_t<sizeof(X) < sizeof(G), X, G>;  // the compute type
  if (a.chunks < 1) return "a gradient needs at least one chunk of rows";
  const bool no_params = dweight == nullptr && dbias == nullptr;
  if (a.cols == 0 || (no_params && (a.rows == 0 || a.dx == nullptr))) return nullptr;
  if (a.cols > kMaxCols) return kTooWide;
  const int64_t warps = row_warps(a.cols);
  const auto run = [&](int most_warps, auto steps, auto w) {
    constexpr int kSteps = decltype(steps)::value;
    const int64_t team_warps = kSteps > 0 ? (warps + kSteps - 1) / kSteps : warps;
    const RowLayout layout{kSteps, kLanes * int(team_warps < most_warps ? team_warps : most_warps),
                           1};
    const auto go = [&](auto bias) {
      return launch(norm_grad_kernel<X, G, D, kSteps, decltype(w), decltype(bias)::value, kDrop>,
                    grid_of(a.chunks), dim3(layout.threads()), stream, a, rng_state, layout);
    };
    return dbias != nullptr ? go(std::true_type{}) : go(std::false_type{});
  };
  const auto run_any = [&]() -> const char* {
    if constexpr (sizeof(A) == sizeof(float)) {
      // With dropout, the registers hold two groups of a thread in bfloat16 only.
      using Steps = std::integral_constant<int, kDrop && !std::is_same_v<P, bf16> ? 1 : 2>;
      if (a.vectors && a.cols % kGroup == 0 && warps <= Steps::value * kGradThreads / kLanes) {
        if (params_are<P>({a.weight})) return run(kGradThreads / kLanes, Steps{}, P{});
        if (params_are<float>({a.weight})) return run(kGradThreads / kLanes, Steps{}, float{});
      }
    }
    return run(8, std::integral_constant<int, 0>{}, AnyParam{});
  };
  if (const char* error = run_any()) return error;
  return sum_partials_cuda<A>(a.dweight, a.dbias, a.chunks, a.cols, dweight, dbias, stream);
}

}  // namespace ckptfused
