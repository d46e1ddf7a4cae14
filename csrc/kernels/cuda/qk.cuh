#pragma once

#include "kernels/cuda/params.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/qk.h"

// How the heads of a [B, T, heads, D] view go to threads. A team of lanes (a power of two, up to a
// warp) takes a few heads of one token at a time; each lane owns the same two groups of eight
// columns of every head, such that both entries of each rotated pair are its own. So nothing is
// exchanged but the sums of a norm, and y may lie over x.

namespace ckptfused {

constexpr int kQkThreads = 128;
constexpr int kUnit = 2 * kGroup;  // columns of a head that a lane owns

// Heads that a team holds at once. More would have more loads under way, but fewer teams fit: a
// lane with a norm holds that norm's parameters, too.
template <typename T, bool kNorm>
constexpr int kHeadsAtOnce = sizeof(T) == 2 && !kNorm ? 2 : 1;

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
  int64_t head_items;  // items of a token
  int64_t items;
  int64_t chunk;  // items of a block
  // What one step, by as many items as a block has teams, adds to (sequence, time, first item).
  int64_t step_batch, step_time, step_item;
  bool vectors, angle_vectors;  // heads, and cos and sin, can be read 16 bytes at a time

  CKPT_HD int teams() const { return kQkThreads / lanes; }
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

// Sets all but chunk. False if a head has more columns than a warp can own.
template <typename T, int kAtOnce>
bool set_qk_grid(const QkShape& a, int64_t tokens, QkGrid& grid) {
  using A = acc_t<T>;
  const int owners = pair_lanes(a) + other_lanes(a);
  if (owners > 32) return false;
  grid.lanes = 1;
  while (grid.lanes < owners) grid.lanes *= 2;
  grid.head_items = (a.heads + kAtOnce - 1) / kAtOnce;
  grid.items = tokens * grid.head_items;
  const int64_t items = grid.head_items == 0 ? 1 : grid.head_items, time = a.time == 0 ? 1 : a.time;
  grid.step_item = grid.teams() % items;
  grid.step_time = grid.teams() / items % time;
  grid.step_batch = grid.teams() / items / time;
  const int64_t half = rotary_half(a);
  grid.vectors = a.rope != RopeKind::half || half * int64_t(sizeof(T)) % 16 == 0;
  grid.angle_vectors = whole_vectors<A>(a.cos, half) && whole_vectors<A>(a.sin, a.cos_batch_stride);
  return true;
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

// A lane's columns of one head as they were loaded: several heads are before the first is worked
// on.
template <typename T>
struct RawUnit {
  Raw<T, kGroup> group[2];

  CKPT_HD void load(const T* head, const HeadUnit& unit, bool wanted, bool vectors) {
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      group[k].load(head + unit.first[k], wanted ? unit.count[k] : 0, vectors);
    }
  }
  CKPT_HD void unpack(acc_t<T>* v) const {
    group[0].unpack(v);
    group[1].unpack(v + kGroup);
  }
};

template <typename T>
CKPT_HD void store_unit(const acc_t<T>* v, const HeadUnit& unit, bool wanted, bool vectors,
                        T* head) {
  if (!wanted) return;
  CKPT_UNROLL
  for (int k = 0; k < 2; ++k) {
    store_group(v + k * kGroup, unit.count[k], vectors, head + unit.first[k]);
  }
}

// The angles of a lane's pairs, zeros where it has none.
template <typename A>
struct RawAngles {
  Raw<A, 4> cos[2], sin[2];

  CKPT_HD void load(const QkShape& a, const QkGrid& grid, const HeadUnit& unit, const QkCursor& at,
                    bool wanted) {
    const int64_t offset = at.batch * a.cos_batch_stride + at.time * rotary_half(a);
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      const int count = wanted ? unit.angles[k] : 0;
      const int64_t first = offset + unit.angle[k];
      cos[k].load(static_cast<const A*>(a.cos) + first, count, grid.angle_vectors);
      sin[k].load(static_cast<const A*>(a.sin) + first, count, grid.angle_vectors);
    }
  }
};

// Rotates pairs of a lane, forward (direction 1) or back (-1).
template <typename A>
struct Rotation {
  A cos[kGroup], sin[kGroup];

  CKPT_HD Rotation(const RawAngles<A>& raw, A direction) {
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      raw.cos[k].unpack(cos + 4 * k);
      raw.sin[k].unpack(sin + 4 * k);
    }
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) sin[i] *= direction;
  }

  CKPT_HD void apply(const QkShape& a, const HeadUnit& unit, A* v) const {
    if (a.rope == RopeKind::half) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) turn(unit, i, v[i], v[kGroup + i]);
    } else if (a.rope == RopeKind::interleaved) {
      CKPT_UNROLL
      for (int i = 0; i < kGroup; ++i) turn(unit, i, v[2 * i], v[2 * i + 1]);
    }
  }

 private:
  CKPT_HD void turn(const HeadUnit& unit, int i, A& x1, A& x2) const {
    if (i % 4 >= unit.angles[i / 4]) return;
    const A first = rope_first(x1, x2, cos[i], sin[i]);
    x2 = rope_second(x1, x2, cos[i], sin[i]);
    x1 = first;
  }
};

template <typename A>
CKPT_HD void load_unit_gain(const QkShape& a, const HeadUnit& unit, A* out) {
  CKPT_UNROLL
  for (int k = 0; k < 2; ++k) {
    load_gain(a.norm, a.weight, unit.first[k], unit.count[k], out + k * kGroup);
  }
}
template <typename A>
CKPT_HD void load_unit_shift(const NormParam& bias, const HeadUnit& unit, A* out) {
  CKPT_UNROLL
  for (int k = 0; k < 2; ++k) {
    load_shift(bias, unit.first[k], unit.count[k], out + k * kGroup);
  }
}

// The sum over the lanes of a team, in every lane. All lanes of the warp take part.
template <typename A>
__device__ __forceinline__ A team_sum(A sum, int lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  return sum;
}

// Statistics of a head, in two passes. v holds zeros outside the head.
template <typename A>
__device__ __forceinline__ NormStats<A> head_stats(const QkShape& a, const QkGrid& grid,
                                                   const HeadUnit& unit, A inverse_dim,
                                                   const A* v) {
  A mean = 0;
  if (norm_is_centred(a.norm)) {
    A sum = 0;
    CKPT_UNROLL
    for (int i = 0; i < kUnit; ++i) sum += v[i];
    mean = team_sum(sum, grid.lanes) * inverse_dim;
  }
  A squares = 0;
  CKPT_UNROLL
  for (int i = 0; i < kUnit; ++i) {
    const A d = i % kGroup < unit.count[i / kGroup] ? v[i] - mean : A(0);
    squares = std::fma(d, d, squares);
  }
  return make_norm_stats(mean, team_sum(squares, grid.lanes) * inverse_dim, A(a.eps));
}

}  // namespace ckptfused
