#pragma once

#include <type_traits>

#include "kernels/cuda/params.cuh"
#include "kernels/cuda/row_sums.cuh"
#include "kernels/cuda/types.cuh"

// What the kernels share that normalise rows.
//
// Blocks stay while there are rows: a team of threads reads the next row while it works on one, and
// keeps what belongs to columns, such as the norm's weights, in registers. Where all groups are
// whole and aligned, a thread holds kSteps groups of a row in registers, too: two or, of wide rows
// of 16 bits, four, as they were loaded and without the next row. For kSteps = 0 each pass reads
// the row anew, which is right at any width and alignment.

namespace ckptfused {

struct RowLayout {
  int steps;  // kSteps
  int team;   // threads, whole warps
  int rows;   // of a block at once; 1 unless a team is a warp

  int threads() const { return team * rows; }
  int64_t blocks(int64_t all_rows) const { return (all_rows + rows - 1) / rows; }
};

// The thread's place in its team, and the first row of its team.
__device__ __forceinline__ RowTeam row_team(const RowLayout& layout, int64_t cols) {
  const int thread = int(threadIdx.x);
  return RowTeam(layout.rows > 1 ? thread % kLanes : thread, layout.team, cols);
}
__device__ __forceinline__ int64_t first_row(const RowLayout& layout) {
  return int64_t(blockIdx.x) * layout.rows + (layout.rows > 1 ? int(threadIdx.x) / kLanes : 0);
}

// map(row), where the first row is 0; 64-bit divisions, some eighty instructions each, only where a
// number needs them.
__device__ __forceinline__ int64_t logical_row_of(const RowMap& map, int64_t row) {
  if (map.inner == 0) return row;
  if (uint64_t(row | map.inner) >> 32 != 0) return row % map.inner * map.outer + row / map.inner;
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

constexpr int kWideSteps = 4;

// A thread's groups of a row of T: in registers, or in memory where kSteps is 0.
template <typename T, int kSteps>
struct Row {
  static constexpr bool kPacked = kSteps == kWideSteps;
  std::conditional_t<kPacked, Raw<T, kGroup>, acc_t<T>[kGroup]> held[kSteps > 0 ? kSteps : 1];
  const T* from;  // the thread's first column
  bool vectors;

  __device__ __forceinline__ void get(const RowTeam& team, int step, acc_t<T>* x) const {
    if constexpr (kPacked) {
      held[step].unpack(x);
    } else if constexpr (kSteps > 0) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) x[i] = held[step][i];
    } else {
      load_group(from + team.offset(step), team.count(step), vectors, x);
    }
  }
  // Other values, of T, in place of those read.
  __device__ __forceinline__ void hold(int step, const acc_t<T>* x) {
    if constexpr (kPacked) {
      held[step].pack(x);
    } else {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) held[step][i] = x[i];
    }
  }
};

// A row that is on its way. Groups without columns are zeros.
template <typename T, int kSteps>
struct RowLoad {
  const T* from = nullptr;
  bool vectors;
  Raw<T, kGroup> raw[kSteps > 0 ? kSteps : 1] = {};

  __device__ __forceinline__ explicit RowLoad(bool vectors) : vectors(vectors) {}
  // at: the thread's first element of the row.
  __device__ __forceinline__ void start(const RowTeam& team, const void* tensor, int64_t at) {
    from = static_cast<const T*>(tensor) + at;
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (team.live(step)) raw[step].load(from + team.offset(step), kGroup, true);
    }
  }
  // Asks for it where there are no registers yet: the next start() finds it in the second-level
  // cache.
  __device__ __forceinline__ void expect(const RowTeam& team, const void* tensor,
                                         int64_t at) const {
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (team.live(step))
        prefetch_global_l2(static_cast<const T*>(tensor) + at + team.offset(step));
    }
  }
  __device__ __forceinline__ void get(const RowTeam& team, int step, acc_t<T>* x) const {
    if constexpr (kSteps > 0) {
      raw[step].unpack(x);
    } else {
      load_group(from + team.offset(step), team.count(step), vectors, x);
    }
  }
  // All of it, unpacked once: more registers, fewer instructions.
  __device__ __forceinline__ Row<T, kSteps> finish() const {
    Row<T, kSteps> taken;
    taken.from = from;
    taken.vectors = vectors;
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (Row<T, kSteps>::kPacked) {
        taken.held[step] = raw[step];
      } else {
        raw[step].unpack(taken.held[step]);
      }
    }
    return taken;
  }
};

// Statistics of the row whose groups get(step, x) gives, zeros where there is no column: two
// passes, mean then variance. kPlain: the norm is one of those without a mean. Those of a kind
// without any leave a row as it is.
template <int kSteps, bool kPlain, typename A, typename Get>
__device__ __forceinline__ NormStats<A> row_stats(RowTeam& team, NormKind kind, A inv_n, A eps,
                                                  Get get) {
  if (!norm_has_stats(kind)) return {A(0), A(1)};
  A mean = 0, sum;
  if (!kPlain && norm_is_centred(kind)) {
    row_sums<kSteps, 1>(team, &sum, [&](int step, A* value) {
      A x[kGroup];
      get(step, x);
      *value = group_sum(x);
    });
    mean = mul_rn(sum, inv_n);
  }
  row_sums<kSteps, 1>(team, &sum, [&](int step, A* value) {
    A x[kGroup];
    get(step, x);
    *value = row_squares<kSteps, kPlain>(team, step, x, mean);
  });
  return make_norm_stats(mean, mul_rn(sum, inv_n), eps);
}

// Weight and bias of a norm: in registers, or read at each use where kHeld is false. kPlain: there
// is no bias.
template <typename A, int kSteps, bool kHeld, bool kPlain>
struct NormParams {
  static constexpr int kGroups = kHeld ? kSteps : 1;
  NormKind kind;
  NormParam weight, bias;
  A gain[kGroups][kGroup], shift[kPlain ? 1 : kGroups][kGroup];

  __device__ __forceinline__ NormParams(const RowTeam& team, NormKind kind, NormParam weight,
                                        NormParam bias)
      : kind(kind), weight(weight), bias(bias) {
    if constexpr (kHeld) {
      for_steps<kSteps>(team, [&](int step) { read(team, step, gain[step], shift[step]); });
    }
  }
  __device__ __forceinline__ void read(const RowTeam& team, int step, A* g, A* s) const {
    const int count = team.count(step);
    load_gain(kind, weight, team.col(step), count, g);
    if (!kPlain) load_shift(bias, team.col(step), count, s);
  }
  __device__ __forceinline__ void get(const RowTeam& team, int step, A* g, A* s) const {
    if constexpr (kHeld) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        g[i] = gain[step][i];
        if constexpr (!kPlain) s[i] = shift[step][i];
      }
    } else {
      read(team, step, g, s);
    }
  }
  __device__ __forceinline__ void get_gain(const RowTeam& team, int step, A* g) const {
    static_assert(kPlain);
    get(team, step, g, nullptr);
  }
  // x = norm(x) of the group of a step.
  __device__ __forceinline__ void apply(const RowTeam& team, int step, NormStats<A> stats,
                                        A* x) const {
    A g[kGroup], s[kGroup];
    get(team, step, g, s);
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const A xhat = normalised(x[i], stats);
      x[i] = kPlain ? mul_rn(xhat, g[i]) : std::fma(xhat, g[i], s[i]);
    }
  }
};

// to: where the thread's first column goes.
template <int kSteps, typename A, typename T>
__device__ __forceinline__ void store_row_group(const RowTeam& team, int step, bool vectors,
                                                const A* x, T* to) {
  if constexpr (kSteps > 0) {
    if (team.live(step)) store_group(x, kGroup, true, to + team.offset(step));
  } else {
    store_group(x, team.count(step), vectors, to + team.offset(step));
  }
}

constexpr int64_t kMaxCols = int64_t(1) << 30;  // columns are counted in int
constexpr const char* kTooWide = "rows of more than 2^30 columns";

// Whether a norm has neither a mean nor a bias, as RMS norms and LayerScale have none.
inline bool norm_is_plain(NormKind kind, const NormParam& bias) {
  return kind != NormKind::none && !norm_is_centred(kind) && bias.data == nullptr;
}

// Threads of a multiprocessor that a kernel has registers for, and of a block at most. Two groups
// of a row and what belongs to their columns take more than 64 registers in float32, or where there
// is a bias.
template <typename R, int kSteps, bool kPlain>
constexpr int kRowThreads = kSteps == 2 && sizeof(R) == 2 && kPlain ? 1024 : 512;
template <typename R, int kSteps, bool kPlain>
constexpr int kMaxTeam = kSteps > 0 ? kRowThreads<R, kSteps, kPlain> : 256;

// Calls f(layout, steps, plain) with what a kernel that takes a row at a time is compiled for:
// kSteps and whether its norms are plain, both std::integral_constants. vectors: all rows consist
// of whole, aligned groups. most: threads of a team. kWide: there are registers for kWideSteps
// groups and the weights of plain norms.
template <typename R, bool kWide, typename F>
const char* for_forward_layout(int64_t cols, bool vectors, bool plain, int most, F f) {
  const int64_t warps = (cols + kWarpColumns - 1) / kWarpColumns;
  if constexpr (sizeof(R) < sizeof(double)) {
    if (vectors && cols % kGroup == 0 && warps <= 2 * most / kLanes) {
      const std::integral_constant<int, 2> two;
      const RowLayout layout =
          warps <= 2 ? RowLayout{2, kLanes, 4} : RowLayout{2, kLanes * int((warps + 1) / 2), 1};
      return plain ? f(layout, two, std::true_type{}) : f(layout, two, std::false_type{});
    }
    if constexpr (sizeof(R) == 2 && kWide) {
      constexpr int kWarps = kMaxTeam<R, kWideSteps, true> / kLanes;
      if (vectors && plain && cols % kGroup == 0 && warps <= kWideSteps * kWarps) {
        return f(RowLayout{kWideSteps, kLanes * int((warps + kWideSteps - 1) / kWideSteps), 1},
                 std::integral_constant<int, kWideSteps>{}, std::true_type{});
      }
    }
  }
  const RowLayout layout{0, kLanes * int(warps < 8 ? warps : 8), 1};
  return f(layout, std::integral_constant<int, 0>{}, std::false_type{});
}

// Blocks that stay while there are rows: as many as fit at once. threads: of a multiprocessor.
inline dim3 row_grid(const RowLayout& layout, int64_t rows, int threads, int64_t multiprocessors) {
  const int64_t most = multiprocessors * (threads / layout.threads());
  const int64_t blocks = layout.blocks(rows);
  return grid_of(blocks < most ? blocks : most);
}

}  // namespace ckptfused
