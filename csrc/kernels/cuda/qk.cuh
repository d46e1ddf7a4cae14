#pragma once

#include "kernels/cuda/params.cuh"
#include "kernels/cuda/qk_grid.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/row_sums.cuh"

// What a lane does with its columns of a head (qk_grid.cuh says which these are).

namespace ckptfused {

// A lane's columns of one head as they were loaded: several heads are before the first is worked
// on.
template <typename T, bool kWhole>
struct RawUnit {
  Raw<T, kGroup> group[2];

  CKPT_HD void load(const T* head, const HeadUnit& unit, bool wanted, bool vectors) {
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      const T* from = head + unit.first[k];
      if constexpr (kWhole) {
        group[k].load_whole(from, wanted && unit.count[0] != 0);
      } else {
        group[k].load(from, wanted ? unit.count[k] : 0, vectors);
      }
    }
  }
  CKPT_HD void unpack(acc_t<T>* v) const {
    group[0].unpack(v);
    group[1].unpack(v + kGroup);
  }
};

template <bool kWhole, typename T>
CKPT_HD void store_unit(const acc_t<T>* v, const HeadUnit& unit, bool wanted, bool vectors,
                        T* head) {
  if (!wanted || (kWhole && unit.count[0] == 0)) return;
  CKPT_UNROLL
  for (int k = 0; k < 2; ++k) {
    if constexpr (kWhole) {
      Raw<T, kGroup> raw;
      raw.pack(v + k * kGroup);
      raw.store_whole(head + unit.first[k]);
    } else {
      store_group(v + k * kGroup, unit.count[k], vectors, head + unit.first[k]);
    }
  }
}

// The angles of a lane's pairs, zeros where it has none.
template <typename A, bool kWhole>
struct RawAngles {
  Raw<A, 4> cos[2], sin[2];

  CKPT_HD void load(const QkShape& a, const QkGrid& grid, const HeadUnit& unit, const QkCursor& at,
                    bool wanted) {
    const int64_t offset = at.batch * a.cos_batch_stride + at.time * rotary_half(a);
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      const int64_t first = offset + unit.angle[k];
      const A *cos_at = static_cast<const A*>(a.cos) + first,
              *sin_at = static_cast<const A*>(a.sin) + first;
      if constexpr (kWhole) {
        cos[k].load_whole(cos_at, wanted && unit.angles[0] != 0);
        sin[k].load_whole(sin_at, wanted && unit.angles[0] != 0);
      } else {
        cos[k].load(cos_at, wanted ? unit.angles[k] : 0, grid.angle_vectors);
        sin[k].load(sin_at, wanted ? unit.angles[k] : 0, grid.angle_vectors);
      }
    }
  }
};

// Rotates pairs of a lane, forward (direction 1) or back (-1).
template <typename A, bool kWhole>
struct Rotation {
  A cos[kGroup], sin[kGroup];

  CKPT_HD Rotation(const RawAngles<A, kWhole>& raw, A direction) {
    CKPT_UNROLL
    for (int k = 0; k < 2; ++k) {
      raw.cos[k].unpack(cos + 4 * k);
      raw.sin[k].unpack(sin + 4 * k);
    }
    CKPT_UNROLL
    for (int i = 0; i < kGroup; ++i) sin[i] *= direction;
  }

  CKPT_HD void apply(const QkShape& a, const HeadUnit& unit, A* v) const {
    if (kWhole && unit.angles[0] == 0) return;
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
    if (!kWhole && i % 4 >= unit.angles[i / 4]) return;
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
template <QkNorm kNorm, bool kWhole, typename A>
__device__ __forceinline__ NormStats<A> head_stats(const QkShape& a, const QkGrid& grid,
                                                   const HeadUnit& unit, A inverse_dim,
                                                   const A* v) {
  A mean = 0;
  if (kNorm == QkNorm::any && norm_is_centred(a.norm)) {
    A sum = 0;
    CKPT_UNROLL
    for (int i = 0; i < kUnit; ++i) sum += v[i];
    mean = mul_rn(team_sum(sum, grid.lanes), inverse_dim);
  }
  A squares = 0;
  CKPT_UNROLL
  for (int i = 0; i < kUnit; ++i) {
    const A d = kWhole || i % kGroup < unit.count[i / kGroup] ? v[i] - mean : A(0);
    squares = std::fma(d, d, squares);
  }
  if (kWhole && unit.count[0] == 0) squares = 0;
  const A variance = mul_rn(team_sum(squares, grid.lanes), inverse_dim);
  return make_norm_stats(mean, variance, A(a.eps));
}

}  // namespace ckptfused
