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

// A block takes kElementThreads * kElementSteps consecutive groups, row after row. Groups of a row
// are counted in int, which is right up to 2^33 columns; launch() refuses more.
struct ElementGrid {
  int64_t rows, cols;
  int64_t step_rows;  // kElementThreads groups further on
  int step_groups;
  int groups, last_count;  // in a row; columns of its last group

  ElementGrid(int64_t rows, int64_t cols) : rows(rows), cols(cols) {
    groups = cols <= kMost ? int((cols + kGroup - 1) / kGroup) : -1;
    last_count = int(cols - int64_t(groups - 1) * kGroup);
    step_rows = groups <= 0 ? 0 : kElementThreads / groups;
    step_groups = groups <= 0 ? 0 : kElementThreads % groups;
  }
  bool empty() const { return rows <= 0 || groups == 0; }
  dim3 blocks() const {
    constexpr int64_t kBlockGroups = int64_t(kElementThreads) * kElementSteps;
    return groups < 0 ? dim3(0u) : grid_of((rows * groups + kBlockGroups - 1) / kBlockGroups);
  }

 private:
  static constexpr int64_t kMost = int64_t(1) << 33;
};

// A group: columns col .. col + count - 1 of a row. One division a thread finds the first; the
// compiler makes it a 32-bit one where both numbers are that small.
struct GroupPlace {
  int64_t row;
  int group;

  __device__ explicit GroupPlace(const ElementGrid& grid) {
    const uint64_t first =
        uint64_t(blockIdx.x) * (kElementThreads * kElementSteps) + uint64_t(threadIdx.x);
    row = int64_t(first / uint64_t(grid.groups));
    group = int(first % uint64_t(grid.groups));
  }
  __device__ int64_t col() const { return int64_t(group) * kGroup; }
  __device__ int count(const ElementGrid& grid) const {
    return group == grid.groups - 1 ? grid.last_count : kGroup;
  }
  // Goes on to the thread's next group, which is there if row < grid.rows.
  __device__ void advance(const ElementGrid& grid) {
    row += grid.step_rows;
    group += grid.step_groups;
    if (group >= grid.groups) {
      group -= grid.groups;
      ++row;
    }
  }
};

// Calls f(row, col, count) for each group of this thread.
template <typename F>
__device__ __forceinline__ void for_groups(const ElementGrid& grid, F f) {
  GroupPlace place(grid);
  CKPT_NO_UNROLL
  for (int step = 0; step < kElementSteps && place.row < grid.rows; ++step) {
    f(place.row, place.col(), place.count(grid));
    place.advance(grid);
  }
}

// Calls work(row, col, count, load(row, col, count)) for each group of this thread. The next group
// is on its way while one is worked on.
template <typename Load, typename Work>
__device__ __forceinline__ void for_loaded_groups(const ElementGrid& grid, Load load, Work work) {
  GroupPlace place(grid);
  if (place.row >= grid.rows) return;
  auto next = load(place.row, place.col(), place.count(grid));
  CKPT_NO_UNROLL
  for (int step = 0; step < kElementSteps && place.row < grid.rows; ++step) {
    const auto loaded = next;
    const GroupPlace at = place;
    place.advance(grid);
    if (step + 1 < kElementSteps && place.row < grid.rows) {
      next = load(place.row, place.col(), place.count(grid));
    }
    work(at.row, at.col(), at.count(grid), loaded);
  }
}

// Whether element i of a group is kept by a dropout that is active, whose threshold may be 2^16.
CKPT_HD bool kept(const Dropout& dropout, const Philox4x32& draws, int i) {
  const uint32_t last_dropped = (dropout.threshold << 16) - 1;  // with any low half
  return (i % 2 == 0 ? draws.word[i / 2] << 16 : draws.word[i / 2]) > last_dropped;
}

// v = dropped v, where dropout is active. A dropped element is 0 even where it was NaN or infinite.
template <typename A>
CKPT_HD void drop_group(const Dropout& dropout, const Philox4x32& draws, A scale, A* v) {
  if (!dropout.active()) return;
  CKPT_UNROLL
  for (int i = 0; i < kGroup; ++i) v[i] = kept(dropout, draws, i) ? v[i] * scale : A(0);
}

}  // namespace ckptfused
