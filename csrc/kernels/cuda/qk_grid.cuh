#pragma once

#include "kernels/cuda/group.cuh"
#include "kernels/qk.h"

// How the heads of a [B, T, heads, D] view go to threads. A team of lanes (a power of two, up to a
// warp) takes a few heads of one token at a time; each lane owns the same two groups of eight
// columns of every head, such that both entries of each rotated pair are its own. So nothing is
// exchanged but the sums of a norm, and y may lie over x.

namespace ckptfused {

constexpr int kQkThreads = 128;
constexpr int kUnit = 2 * kGroup;  // columns of a head that a lane owns

// plain: without a mean, without a bias, and of a gradient without that of a bias.
enum class QkNorm { none, plain, any };

// Heads that a team holds at once. More would have more loads under way, but fewer teams fit: the
// gradient's lanes hold two tensors and a norm's sums.
template <typename T, QkNorm kNorm, bool kGrad>
constexpr int kHeadsAtOnce = sizeof(T) == 2 && !(kGrad && kNorm != QkNorm::none) ? 2 : 1;

// Calls f(kNorm) for the parts' norm.
template <typename Parts, typename F>
const char* for_norm(const Parts& parts, bool plain, F f) {
  using std::integral_constant;
  if (parts.part[0].norm == NormKind::none) return f(integral_constant<QkNorm, QkNorm::none>{});
  return plain && !norm_is_centred(parts.part[0].norm)
             ? f(integral_constant<QkNorm, QkNorm::plain>{})
             : f(integral_constant<QkNorm, QkNorm::any>{});
}

// begin .. end - 1, at most most of them, none if end is before begin.
CKPT_HD int count_between(int begin, int end, int most) {
  const int n = end - begin;
  return n < 0 ? 0 : (n < most ? n : most);
}

// The columns of a lane: two groups, and the two runs of four angles that rotate their pairs.
struct HeadUnit {
  int first[2], count[2];
  int angle[2], angles[2];
};

CKPT_HD int rotary_half(const QkShape& a) {
  return a.rope == RopeKind::none ? 0 : int(a.rotary_dim / 2);
}
// Lanes that own pairs, when entry i is paired with i + half: group j of each half. All other
// columns go in groups, lane by lane, the first half of the groups and then the second.
CKPT_HD int pair_lanes(const QkShape& a) {
  return a.rope == RopeKind::half ? (rotary_half(a) + kGroup - 1) / kGroup : 0;
}
CKPT_HD int other_lanes(const QkShape& a) {
  const int columns = int(a.head_dim) - (a.rope == RopeKind::half ? 2 * rotary_half(a) : 0);
  return (columns + kUnit - 1) / kUnit;
}

CKPT_HD HeadUnit head_unit(const QkShape& a, int lane) {
  const int half = rotary_half(a), pairs = pair_lanes(a), others = other_lanes(a);
  HeadUnit unit;
  CKPT_UNROLL
  for (int k = 0; k < 2; ++k) {
    if (lane < pairs) {
      unit.first[k] = k * half + kGroup * lane;
      unit.count[k] = count_between(kGroup * lane, half, kGroup);
      unit.angle[k] = kGroup * lane + 4 * k;
      unit.angles[k] = count_between(unit.angle[k], half, 4);
    } else {
      const int begin = a.rope == RopeKind::half ? 2 * half : 0, index = lane - pairs;
      unit.first[k] = begin + kGroup * (index + k * others);
      unit.count[k] = index < others ? count_between(unit.first[k], int(a.head_dim), kGroup) : 0;
      unit.angle[k] = unit.first[k] / 2;
      unit.angles[k] = a.rope == RopeKind::interleaved && index < others
                           ? count_between(unit.angle[k], half, 4)
                           : 0;
    }
  }
  return unit;
}

// What the host works out. An item is kAtOnce consecutive heads of one token.
struct QkGrid {
  int lanes;           // of a team
  int teams;           // of a block: no division in a loop
  int64_t head_items;  // items of a token
  int64_t items;
  int64_t chunk;  // items of a block
  // What one step, by as many items as a block has teams, adds to (sequence, time, first item).
  int64_t step_batch, step_time, step_item;
  int64_t first_block, blocks;  // of a launch
  bool vectors, angle_vectors;  // heads, and cos and sin, can be read 16 bytes at a time
  bool whole;  // all that, and each lane has both its groups or none, and turns both or none
};

template <typename T>
bool whole_vectors(const HeadsView<const void*>& v) {
  return whole_vectors<T>(v.data, v.batch_stride) && whole_vectors<T>(v.data, v.time_stride) &&
         whole_vectors<T>(v.data, v.head_stride);
}
template <typename T>
bool whole_vectors(const HeadsView<void*>& v) {
  return whole_vectors<T>(
      HeadsView<const void*>{v.data, v.batch_stride, v.time_stride, v.head_stride});
}

constexpr const char* kHeadTooWide = "head_dim: at most 256 is supported";

// Sets all but chunk and blocks. False if a head has more columns than a warp can own.
template <typename T, int kAtOnce>
bool set_qk_grid(const QkShape& a, int64_t tokens, QkGrid& grid) {
  using A = acc_t<T>;
  const int owners = pair_lanes(a) + other_lanes(a);
  if (owners > 32) return false;
  grid.lanes = 1;
  while (grid.lanes < owners) grid.lanes *= 2;
  grid.teams = kQkThreads / grid.lanes;
  grid.head_items = (a.heads + kAtOnce - 1) / kAtOnce;
  grid.items = tokens * grid.head_items;
  const int64_t items = grid.head_items == 0 ? 1 : grid.head_items, time = a.time == 0 ? 1 : a.time;
  grid.step_item = grid.teams % items;
  grid.step_time = grid.teams / items % time;
  grid.step_batch = grid.teams / items / time;
  const int64_t half = rotary_half(a);
  grid.vectors = a.rope != RopeKind::half || half * int64_t(sizeof(T)) % 16 == 0;
  grid.angle_vectors = whole_vectors<A>(a.cos, half) && whole_vectors<A>(a.sin, a.cos_batch_stride);
  return true;
}

// Whether vectors, which is set, makes the grid whole.
inline bool is_whole(const QkShape& a, const QkGrid& grid) {
  bool whole = grid.vectors && grid.angle_vectors;
  for (int lane = 0; lane < grid.lanes; ++lane) {
    const HeadUnit unit = head_unit(a, lane);
    whole &= unit.count[0] % kGroup == 0 && unit.count[1] == unit.count[0];
    whole &= unit.angles[0] % 4 == 0 && unit.angles[1] == unit.angles[0];
  }
  return whole;
}

// Where a team is: the item-th few heads of token (batch, time).
struct QkCursor {
  int64_t batch, time, item;

  CKPT_HD QkCursor(const QkShape& a, const QkGrid& grid, int64_t index) {
    const int64_t items = grid.head_items == 0 ? 1 : grid.head_items;
    const int64_t token = int64_t(uint64_t(index) / uint64_t(items));
    const int64_t times = a.time == 0 ? 1 : a.time;
    item = index - token * items;
    batch = int64_t(uint64_t(token) / uint64_t(times));
    time = token - batch * times;
  }
  CKPT_HD void step(const QkShape& a, const QkGrid& grid) {
    item += grid.step_item;
    time += grid.step_time;
    batch += grid.step_batch;
    if (item >= grid.head_items) {
      item -= grid.head_items;
      ++time;
    }
    if (time >= a.time) {
      time -= a.time;
      ++batch;
    }
  }
};

template <typename T, typename Pointer>
CKPT_HD T* head_at(const HeadsView<Pointer>& v, const QkCursor& at, int64_t head) {
  return static_cast<T*>(v.data) + at.batch * v.batch_stride + at.time * v.time_stride +
         head * v.head_stride;
}

// One launch: its blocks take one part after the other.
template <typename Heads>
struct QkLaunch {
  Heads part[3];
  QkGrid grid[3];
  QkGrads grads[3];
  int count = 0;

  // The part of a block.
  __device__ int part_of(int64_t block) const {
    int n = 0;
    while (n + 1 < count && block >= grid[n + 1].first_block) ++n;
    return n;
  }
  void add(const Heads& heads, const QkGrid& of_heads) {
    if (of_heads.blocks == 0) return;
    part[count] = heads;
    grid[count] = of_heads;
    grid[count].first_block = blocks();
    ++count;
  }
  bool whole() const {
    bool all = true;
    for (int n = 0; n < count; ++n) all &= grid[n].whole;
    return all;
  }
  int64_t blocks() const {
    return count == 0 ? 0 : grid[count - 1].first_block + grid[count - 1].blocks;
  }
};

}  // namespace ckptfused
