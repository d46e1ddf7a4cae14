#pragma once

#include "kernels/cuda/raw.cuh"
#include "kernels/norm.h"
#include "math/dropout.h"

// Sums over a row whose bits do not depend on how many threads share it.
//
// Columns go to threads in groups of eight. 32 neighbouring groups, 256 columns, are a warp's and
// make a block of the row; the sum has one order, whatever the team of threads: the eight columns
// of a group, the 32 groups of a block by shuffles, and the blocks' sums by one tree. Where a
// product is added, std::fma says so, or the compiler would choose in each kernel anew.

namespace ckptfused {

constexpr int kLanes = 32;
constexpr int kRowSlots = 64;  // sums of blocks that one barrier hands over
static_assert(kLanes * kGroup == kWarpColumns);

// kCount sums over a warp at once: a lane returns that of values[lane * kCount / 32]. As long as
// there are two values, the halves of the warp exchange one each, so that a shuffle serves both;
// the order of every sum is that of the butterfly.
template <int kCount, int kMask = kLanes / 2, typename A>
__device__ __forceinline__ A warp_sums(const A* values, int lane) {
  if constexpr (kCount == 1) {
    A value = values[0];
    CKPT_UNROLL
    for (int mask = kMask; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
    return value;
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & kMask) != 0;
    A half[kHalf];
    CKPT_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const A mine = upper ? values[kHalf + i] : values[i];
      const A other = upper ? values[i] : values[kHalf + i];
      half[i] = mine + __shfl_xor_sync(~0u, other, kMask);
    }
    return warp_sums<kHalf, kMask / 2>(half, lane);
  }
}

// Value n, in all lanes, of what warp_sums<kCount> returns.
template <int kCount, typename A>
__device__ __forceinline__ A lane_sum(A sum, int n) {
  return kCount == 1 ? sum : __shfl_sync(~0u, sum, n * (kLanes / kCount));
}

// A thread's place in its team, and the columns that it owns: the groups thread, thread + team,
// thread + 2 * team, ... of a row.
struct RowTeam {
  int thread, lane, warps;
  int cols, blocks;  // of a row; blocks of 256 columns
  int round = 0;

  __device__ RowTeam(int thread, int threads, int64_t cols)
      : thread(thread),
        lane(thread % kLanes),
        warps(threads / kLanes),
        cols(int(cols)),
        blocks(int((cols + kWarpColumns - 1) / kWarpColumns)) {}

  // From a thread's first column to that of a step.
  __device__ int offset(int step) const { return step * warps * (kLanes * kGroup); }
  __device__ int col(int step) const { return thread * kGroup + offset(step); }
  // Whether a group has columns. Where groups are whole, all eight.
  __device__ bool live(int step) const { return col(step) < cols; }
  __device__ int count(int step) const {
    const int left = cols - col(step);
    return left >= kGroup ? kGroup : left <= 0 ? 0 : left;
  }
  __device__ int steps() const { return (blocks + warps - 1) / warps; }
};

// What the warps of a team hand over: sums of the row's blocks, that of block b in slot b % 64.
// Calls use two sets in turn: when a thread writes to one again, the barrier between has seen all
// threads done with it.
template <typename A, int kCount>
__device__ __forceinline__ A* row_slots(int round) {
  __shared__ A slots[2][kCount * kRowSlots];
  return slots[round];
}

// The sums of what is in the slots, by a tree of 64 leaves.
template <int kCount, typename A>
__device__ __forceinline__ void sum_slots(RowTeam& team, const A* slots, A* sums) {
  __syncthreads();
  A values[kCount];
  CKPT_UNROLL
  for (int n = 0; n < kCount; ++n) {
    values[n] = team.lane < team.blocks ? slots[n * kRowSlots + team.lane] : A(0);
    if (team.lane + kLanes < team.blocks) values[n] += slots[n * kRowSlots + kLanes + team.lane];
  }
  const A total = warp_sums<kCount>(values, team.lane);
  CKPT_UNROLL
  for (int n = 0; n < kCount; ++n) sums[n] = lane_sum<kCount>(total, n);
  team.round ^= 1;
}

// sums[n] = the sum over the row of what term(step, values) puts into values[n], kCount sums at
// once. All threads of a block take part, unless a team is one warp that holds its row. kSteps: the
// groups of a thread, or 0 where that is not known when compiling.
template <int kSteps, int kCount, typename A, typename Term>
__device__ __forceinline__ void row_sums(RowTeam& team, A* sums, Term term) {
  A* slots = row_slots<A, kCount>(team.round);
  const int warp = team.thread / kLanes;
  if constexpr (kSteps > 0) {
    // Value n of step s is number n * kSteps + s, and in the end with these lanes:
    constexpr int kSpan = kLanes / (kSteps * kCount);
    A values[kCount * kSteps];
    CKPT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      A of_step[kCount];
      term(step, of_step);
      CKPT_UNROLL
      for (int n = 0; n < kCount; ++n) values[n * kSteps + step] = of_step[n];
    }
    const A mine = warp_sums<kCount * kSteps>(values, team.lane);
    if constexpr (kSteps <= 2) {
      if (team.warps == 1) {  // a zero stands for the rest of the tree
        const A both = (kSteps == 1 ? mine : mine + __shfl_xor_sync(~0u, mine, kSpan)) + A(0);
        CKPT_UNROLL
        for (int n = 0; n < kCount; ++n) sums[n] = lane_sum<kCount>(both, n);
        return;
      }
    }
    if (team.lane % kSpan == 0) {
      const int value = team.lane / kSpan;
      slots[value / kSteps * kRowSlots + value % kSteps * team.warps + warp] = mine;
    }
  } else {
    // Blocks b, b + 64, ... are those of one warp.
    int block = warp;
    for (int step = 0; step < team.steps(); ++step, block += team.warps) {
      A values[kCount];
      term(step, values);
      const A mine = warp_sums<kCount>(values, team.lane);
      if (team.lane % (kLanes / kCount) == 0) {
        A* slot = slots + team.lane / (kLanes / kCount) * kRowSlots + block % kRowSlots;
        *slot = block < kRowSlots ? mine : *slot + mine;
      }
    }
  }
  sum_slots<kCount>(team, slots, sums);
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

// Likewise of a thread's group, zeros where it has no columns. kPlain: the mean is 0.
template <int kSteps, bool kPlain, typename A>
__device__ __forceinline__ A row_squares(const RowTeam& team, int step, const A* x, A mean) {
  if constexpr (kSteps == 0) return group_squares(x, mean, team.count(step));
  const A squares = group_squares(x, kPlain ? A(0) : mean, kGroup);
  return kPlain || team.live(step) ? squares : A(0);
}

}  // namespace ckptfused
