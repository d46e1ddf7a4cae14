#pragma once

#include "kernels/cuda/raw.cuh"

// What kernels share whose elements do not depend on each other: how the groups of a [rows, cols]
// tensor go to threads, and dropout of a group.

namespace ckptfused {

constexpr int kElementThreads = 256;
constexpr int kElementSteps = 4;  // groups that a thread takes, kElementThreads groups apart
// Blocks that a multiprocessor must be able to hold. Said, because the compiler otherwise aims
// higher, and spills.
template <typename A>
constexpr int kElementBlocks = sizeof(A) == 8 ? 1 : 4;

// A block takes kElementThreads * kElementSteps consecutive groups, row after row.
struct ElementGrid {
  int64_t rows, cols;
  int64_t groups;                  // in a row
  int64_t step_rows, step_groups;  // kElementThreads groups further on

  ElementGrid(int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        groups((cols + kGroup - 1) / kGroup),
        step_rows(groups == 0 ? 0 : kElementThreads / groups),
        step_groups(groups == 0 ? 0 : kElementThreads % groups) {}
  bool empty() const { return rows <= 0 || groups <= 0; }
  dim3 blocks() const {
    constexpr int64_t kBlockGroups = int64_t(kElementThreads) * kElementSteps;
    return grid_of((rows * groups + kBlockGroups - 1) / kBlockGroups);
  }
};

// Calls f(row, col, count) for each group of this thread: columns col .. col + count - 1 of a row.
// One division a thread; the compiler makes it a 32-bit one where both numbers are that small.
template <typename F>
__device__ __forceinline__ void for_groups(const ElementGrid& grid, F f) {
  const uint64_t first =
      uint64_t(blockIdx.x) * (kElementThreads * kElementSteps) + uint64_t(threadIdx.x);
  int64_t row = int64_t(first / uint64_t(grid.groups));
  int64_t group = int64_t(first % uint64_t(grid.groups));
  CKPT_NO_UNROLL
  for (int step = 0; step < kElementSteps && row < grid.rows; ++step) {
    const int64_t col = group * kGroup, left = grid.cols - col;
    f(row, col, left < kGroup ? int(left) : kGroup);
    row += grid.step_rows;
    group += grid.step_groups;
    if (group >= grid.groups) {
      group -= grid.groups;
      ++row;
    }
  }
}

// v = dropped v, where dropout is active. A dropped element is 0 even where it was NaN or infinite.
template <typename A>
CKPT_HD void drop_group(const Dropout& dropout, const Philox4x32& draws, A scale, A* v) {
  if (!dropout.active()) return;
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t draw = (draws.word[i >> 1] >> (16 * (i & 1))) & 0xffffu;
    v[i] = draw >= dropout.threshold ? v[i] * scale : A(0);
  }
}

}  // namespace ckptfused
