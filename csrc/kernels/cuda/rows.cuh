#pragma once

#include "kernels/cuda/params.cuh"
#include "kernels/cuda/types.cuh"
#include "math/dropout.h"

// What the kernels share that normalise rows.
//
// A team of threads shares a row; thread t takes the groups t, t + team, t + 2 * team, ... of eight
// columns. Where all groups are whole and aligned, kSteps groups of a thread are read once and stay
// in its registers from pass to pass. For kSteps = 0 each pass reads the row anew, which is right
// at any width and alignment.
//
// A sum over a row has one order, whatever the team: the eight columns of a group, 32 neighbouring
// groups by shuffles, and these sums of a warp from left to right. So every kernel finds the same
// bits for the same row. Where a product is added, std::fma says so, or the compiler would choose
// in each kernel anew.

namespace ckptfused {

constexpr int kLanes = 32;
constexpr int kMaxRowWarps = 64;  // sums of warps that one barrier hands over

struct RowLayout {
  int steps;  // kSteps
  int team;   // threads, whole warps
  int rows;   // of a block; 1 unless a team is a warp

  int threads() const { return team * rows; }
  int64_t blocks(int64_t all_rows) const { return (all_rows + rows - 1) / rows; }
};

// Warps that it takes to read a row at once.
inline int64_t row_warps(int64_t cols) {
  static_assert(kLanes * kGroup == kWarpColumns);
  return (cols + kWarpColumns - 1) / kWarpColumns;
}

// A thread's place in its team, and the columns that it owns.
struct RowTeam {
  int thread, warps;
  int cols;  // 0 where the row is beyond the last
  int round = 0;

  __device__ RowTeam(const RowLayout& layout, bool live, int64_t cols)
      : thread(int(threadIdx.x) % layout.team),
        warps(layout.team / kLanes),
        cols(live ? int(cols) : 0) {}

  __device__ int col(int step) const { return (step * (warps * kLanes) + thread) * kGroup; }
  // Of the eight columns. Where groups are whole, all or none.
  __device__ int count(int step) const {
    const int left = cols - col(step);
    return left >= kGroup ? kGroup : left <= 0 ? 0 : left;
  }
  __device__ int steps() const {
    const int columns = warps * kLanes * kGroup;
    return (cols + columns - 1) / columns;
  }
};

// The row of a thread's team, where a kernel takes layout.rows rows a block.
__device__ __forceinline__ int64_t row_of_thread(const RowLayout& layout) {
  return int64_t(blockIdx.x) * layout.rows + int(threadIdx.x) / layout.team;
}

// map(row); 64-bit divisions, some eighty instructions each, only where a number needs them.
__device__ __forceinline__ int64_t logical_row_of(const RowMap& map, int64_t row) {
  if (map.inner == 0) return row;
  if (uint64_t(row | map.inner) >> 32 != 0) return map(row);
  const uint32_t inner = uint32_t(map.inner);
  return int64_t(uint32_t(row) % inner) * map.outer + uint32_t(row) / inner;
}

// Calls f(step) for the steps of a thread.
template <int kSteps, typename F>
__device__ __forceinline__ void for_steps(const RowTeam& team, F f) {
  if constexpr (kSteps > 0) {
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) f(step);
  } else {
    for (int step = 0; step < team.steps(); ++step) f(step);
  }
}

template <typename A>
__device__ __forceinline__ A warp_sum(A value) {
  CKPT_UNROLL
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// sums[n] = the sum over the row of what term(step, values) puts into values[n], kCount sums at
// once. All threads of the block take part. Consecutive calls use slots in turn: when a thread
// writes to slots again, the barrier between has seen all threads done with them.
template <int kSteps, int kCount, typename A, typename Term>
__device__ __forceinline__ void row_sums(RowTeam& team, A* sums, Term term) {
  __shared__ A slots[2][kCount][kMaxRowWarps];
  const int warp = team.thread / kLanes;
  const bool first_lane = team.thread % kLanes == 0;
  CKPT_UNROLL
  for (int n = 0; n < kCount; ++n) sums[n] = A(0);
  if constexpr (kSteps > 0) {
    A values[kSteps][kCount];
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      term(step, values[step]);
      CKPT_UNROLL
      for (int n = 0; n < kCount; ++n) values[step][n] = warp_sum(values[step][n]);
    }
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      CKPT_UNROLL
      for (int n = 0; n < kCount; ++n) {
        if (team.warps == 1) {
          sums[n] += values[step][n];
        } else if (first_lane) {
          slots[team.round][n][step * team.warps + warp] = values[step][n];
        }
      }
    }
    if (team.warps == 1) return;
    __syncthreads();
    for (int w = 0; w < kSteps * team.warps; ++w) {
      CKPT_UNROLL
      for (int n = 0; n < kCount; ++n) sums[n] += slots[team.round][n][w];
    }
    team.round ^= 1;
  } else {
    for (int step = 0; step < team.steps(); ++step) {
      A values[kCount];
      term(step, values);
      CKPT_UNROLL
      for (int n = 0; n < kCount; ++n) {
        values[n] = warp_sum(values[n]);
        if (first_lane) slots[team.round][n][warp] = values[n];
      }
      __syncthreads();
      for (int w = 0; w < team.warps; ++w) {
        CKPT_UNROLL
        for (int n = 0; n < kCount; ++n) sums[n] += slots[team.round][n][w];
      }
      team.round ^= 1;
    }
  }
}

// The sums of a group's elements and of their squared distances from the mean.
template <typename A>
CKPT_HD A group_sum(const A* x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
template <typename A>
CKPT_HD A group_squares(const A* x, A mean, int count) {
  A sum = 0;
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    const A d = i < count ? x[i] - mean : A(0);
    sum = std::fma(d, d, sum);
  }
  return sum;
}

// Statistics of the row whose groups get(step, x) gives, zeros where there is no column: two
// passes, mean then variance. Those of kind none leave a row as it is.
template <int kSteps, typename A, typename Get>
__device__ __forceinline__ NormStats<A> row_stats(RowTeam& team, NormKind kind, A eps, Get get) {
  if (kind == NormKind::none) return {A(0), A(1)};
  const A n = A(team.cols);
  A mean = 0, variance = 0;
  CKPT_NO_UNROLL
  for (int pass = norm_is_centred(kind) ? 0 : 1; pass < 2; ++pass) {
    A sum;
    row_sums<kSteps, 1>(team, &sum, [&](int step, A* value) {
      A x[kGroup];
      get(step, x);
      *value = pass == 0 ? group_sum(x) : group_squares(x, mean, team.count(step));
    });
    (pass == 0 ? mean : variance) = sum / n;
  }
  return make_norm_stats(mean, variance, eps);
}

// x = norm(x) of the group of a step.
template <typename W, typename A>
__device__ __forceinline__ void apply_norm(const RowTeam& team, int step, NormKind kind,
                                           NormStats<A> stats, const NormParam& weight,
                                           const NormParam& bias, A* x) {
  A gain[kGroup], shift[kGroup];
  load_gain<W>(kind, weight, team.col(step), team.count(step), gain);
  load_shift<W>(bias, team.col(step), team.count(step), shift);
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) x[i] = std::fma(normalised(x[i], stats), gain[i], shift[i]);
}

// A thread's groups of a row in memory.
template <typename T, int kSteps>
struct RowReader {
  const T* row;
  bool vectors;
  Raw<T, kGroup> held[kSteps > 0 ? kSteps : 1];

  __device__ __forceinline__ RowReader(const T* row, bool vectors) : row(row), vectors(vectors) {}
  __device__ __forceinline__ void clear() {
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) held[step] = {};
  }
  // Fills the registers.
  __device__ __forceinline__ void load(const RowTeam& team) {
    clear();
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (team.count(step) > 0) held[step].load(row + team.col(step), kGroup, true);
    }
  }
  // Other values in place of those read; exact in T.
  __device__ __forceinline__ void hold(int step, const acc_t<T>* x) {
    T stored[kGroup];
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) from_acc(x[i], stored[i]);
    held[step].load(stored, kGroup, false);
  }
  __device__ __forceinline__ void get(const RowTeam& team, int step, acc_t<T>* x) const {
    if constexpr (kSteps > 0) {
      held[step].unpack(x);
    } else {
      load_group(row + team.col(step), team.count(step), vectors, x);
    }
  }
};

template <int kSteps, typename A, typename T>
__device__ __forceinline__ void store_row_group(const RowTeam& team, int step, bool vectors,
                                                const A* x, T* row) {
  const int count = team.count(step);
  if constexpr (kSteps > 0) {
    if (count > 0) store_group(x, kGroup, true, row + team.col(step));
  } else {
    store_group(x, count, vectors, row + team.col(step));
  }
}

constexpr int64_t kMaxCols = int64_t(1) << 30;  // columns are counted in int
constexpr const char* kTooWide = "rows of more than 2^30 columns";

// Threads of a team at most that hold rows of R: registers for 1024 would not do for float.
template <typename R>
constexpr int kMaxTeam = sizeof(R) == 2 ? 1024 : 512;

// Calls f(layout, steps, threads, W{}) with what a kernel that takes a row at a time is compiled
// for: kSteps and the most threads of a block, both std::integral_constants, and the dtype of the
// norms' parameters. vectors: all rows consist of whole, aligned groups.
template <typename R, typename P, typename F>
const char* for_forward_layout(int64_t cols, bool vectors, std::initializer_list<NormParam> params,
                               F f) {
  const int64_t warps = row_warps(cols);
  if constexpr (sizeof(R) < sizeof(double)) {
    const bool as_compute = params_are<P>(params);
    if (vectors && cols % kGroup == 0 && warps <= 2 * kMaxTeam<R> / kLanes &&
        (as_compute || params_are<float>(params))) {
      const RowLayout layout =
          warps <= 2 ? RowLayout{2, kLanes, 4} : RowLayout{2, kLanes * int((warps + 1) / 2), 1};
      using Two = std::integral_constant<int, 2>;
      const auto run = [&](auto w) {
        if constexpr (kMaxTeam<R> > 512) {
          if (layout.team > 512) return f(layout, Two{}, std::integral_constant<int, 1024>{}, w);
        }
        return f(layout, Two{}, std::integral_constant<int, 512>{}, w);
      };
      return as_compute ? run(P{}) : run(float{});
    }
  }
  return f(RowLayout{0, kLanes * int(warps < 8 ? warps : 8), 1}, std::integral_constant<int, 0>{},
           std::integral_constant<int, 256>{}, AnyParam{});
}

}  // namespace ckptfused
