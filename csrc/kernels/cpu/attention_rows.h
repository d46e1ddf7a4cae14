#pragma once

// Pieces of the attention row kernels that are the same for every instruction set.

#include <cmath>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/operand_rows.h"
#include "kernels/cpu/rows.h"
#include "math/elementary.h"
#include "math/softmax.h"

namespace ckptfused {

// A tile's rows have whole blocks of so many columns. Loops over a block are unrolled, so that the
// latency of one vector's exponential hides behind another's.
constexpr int kBlock = 32;

// The largest of x; NaN is passed over.
template <typename A>
CKPT_HD A row_max(const A* x, int64_t n) {
  A lane[kBlock];
  for (int l = 0; l < kBlock; ++l) lane[l] = A(-INFINITY);
  for (int64_t i = 0; i < n; i += kBlock) {
    for (int l = 0; l < kBlock; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  }
  return fold_halves<kBlock>(
      lane, [](auto& low, const auto& high) CKPT_INLINE { low = low > high ? low : high; });
}

// Calls f(i) for the columns of a row.
template <typename F>
CKPT_HD void for_columns(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kBlock) {
    CKPT_IVDEP
    for (int l = 0; l < kBlock; ++l) f(i + l);
  }
}

template <typename T>
CKPT_HD acc_t<T> dot_row(const T* x, const T* y, int64_t n) {
  return lane_sum<acc_t<T>>(n, [&](int64_t i) CKPT_INLINE { return to_acc(x[i]) * to_acc(y[i]); });
}

// An added value this low hides its key, as -inf does. It is how models write "masked" (-1e9, the
// type's lowest), and it swallows the logit: of a row that sees nothing, no log-sum-exp would tell
// how many keys there are.
template <typename A, typename M>
CKPT_HD A added_value(const M& value) {
  const A v = A(to_acc(value));
  return v <= (std::is_same_v<M, f16> ? A(-65504) : A(-5e8)) ? A(-INFINITY) : v;
}

template <typename A, typename M>
CKPT_HD void add_values(const M* mask, int64_t stride, int64_t cols, A* bias) {
  if (stride == 1) {
    CKPT_IVDEP
    for (int64_t i = 0; i < cols; ++i) bias[i] = masked_logit(bias[i], added_value<A>(mask[i]));
  } else {
    for (int64_t i = 0; i < cols; ++i) {
      bias[i] = masked_logit(bias[i], added_value<A>(mask[i * stride]));
    }
  }
}

// Adds one row of a mask to bias: columns [key, key + cols).
template <typename A>
CKPT_HD void add_mask_row(const MaskView& mask, int64_t query, int64_t key, int64_t cols, A* bias) {
  if (mask.kind == MaskKind::none) return;
  const int64_t stride = mask.key_stride, offset = query * mask.query_stride + key * stride;
  if (mask.kind != MaskKind::add) {
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + offset;
    const bool kept = mask.kind == MaskKind::keep;
    for (int64_t i = 0; i < cols; ++i) {
      bias[i] = (bytes[i * stride] != 0) == kept ? bias[i] : A(-INFINITY);
    }
    return;
  }
  switch (mask.dtype) {
    case DType::f64:
      return add_values(static_cast<const double*>(mask.data) + offset, stride, cols, bias);
    case DType::f32:
      return add_values(static_cast<const float*>(mask.data) + offset, stride, cols, bias);
    case DType::bf16:
      return add_values(static_cast<const bf16*>(mask.data) + offset, stride, cols, bias);
    case DType::f16:
      return add_values(static_cast<const f16*>(mask.data) + offset, stride, cols, bias);
  }
}

// The masks of a tile, a row at a time; a row that all queries share is made once.
template <typename A>
struct BiasRows {
  const AttentionRule& rule;
  const ScoreTile& tile;
  const bool any = rule.mask.kind != MaskKind::none || rule.padding.kind != MaskKind::none;
  const bool shared = rule.mask.query_stride == 0 && rule.padding.query_stride == 0;
  alignas(64) A row[kKeyTile];

  // logits += masks for columns [begin, end) of row r; rows are asked for in order from 0.
  CKPT_HD void add(int64_t r, int64_t begin, int64_t end, A* logits) {
    if (!any) return;
    if (r == 0 || !shared) {
      const int64_t left = rule.keys - tile.key, cols = left < tile.cols ? left : tile.cols;
      for (int64_t i = 0; i < cols; ++i) row[i] = 0;
      add_mask_row(rule.mask, tile.query + r, tile.key, cols, row);
      add_mask_row(rule.padding, tile.query + r, tile.key, cols, row);
    }
    CKPT_IVDEP
    for (int64_t i = begin; i < end; ++i) logits[i] = masked_logit(logits[i], row[i]);
  }
};

// The columns of a tile that row r sees by position.
CKPT_HD KeyRange seen_columns(const AttentionRule& rule, const ScoreTile& tile, int64_t r) {
  const KeyRange keys = visible_keys(tile.query + r, rule.keys, rule.causal, rule.window);
  int64_t begin = keys.begin - tile.key, end = keys.end - tile.key;
  end = end < 0 ? 0 : (end > tile.cols ? tile.cols : end);
  begin = begin < 0 ? 0 : (begin > end ? end : begin);
  return {begin, end};
}

// The other columns become value.
template <typename A>
CKPT_HD void fill_unseen(const ScoreTile& tile, const KeyRange& seen, A value, A* row) {
  for (int64_t i = 0; i < seen.begin; ++i) row[i] = value;
  for (int64_t i = seen.end; i < tile.cols; ++i) row[i] = value;
}

// Of logits, so that exp is 2 to a power.
template <typename A>
constexpr A kLog2E = A(1.44269504088896340736);

// Whether logits are products times a scale, and may be hidden before they are multiplied by it.
CKPT_HD bool plain_logits(const AttentionRule& rule) {
  return rule.softcap == 0 && rule.mask.kind == MaskKind::none &&
         rule.padding.kind == MaskKind::none && rule.scale >= kLeastScale;
}

// Turns row r of products into logits: -inf where masked. slope: derivatives of a soft cap, or
// null. Returns what the row sees by position.
template <typename A>
CKPT_HD KeyRange products_to_logits(const AttentionRule& rule, const ScoreTile& tile,
                                    BiasRows<A>& bias, int64_t r, A* row, A* slope) {
  const A scale = A(rule.scale), cap = A(rule.softcap);
  if (cap != 0) {
    CKPT_IVDEP
    for (int64_t i = 0; i < tile.cols; ++i) {
      const A t = tanh_acc(scale * row[i] / cap);
      if (slope != nullptr) slope[i] = A(1) - t * t;
      row[i] = cap * t;
    }
  } else {
    for_columns(tile.cols, [&](int64_t i) CKPT_INLINE { row[i] *= scale; });
  }
  const KeyRange seen = seen_columns(rule, tile, r);
  bias.add(r, seen.begin, seen.end, row);
  fill_unseen(tile, seen, A(-INFINITY), row);
  return seen;
}

// As above, but for a scale that is left to be multiplied by, which is returned; else 1.
// Differences of products are exact where those of scaled ones, in one instruction, are not.
template <typename A>
CKPT_HD A products_to_unscaled(const AttentionRule& rule, const ScoreTile& tile, BiasRows<A>& bias,
                               int64_t r, A* row) {
  if (plain_logits(rule)) {
    fill_unseen(tile, seen_columns(rule, tile, r), A(-INFINITY), row);
    return A(rule.scale);
  }
  products_to_logits<A>(rule, tile, bias, r, row, nullptr);
  return A(1);
}

// exp(logit - shift). A log-sum-exp that is the shift is rounded: of logits as large as 1e9 it may
// be less than the largest by a hundred.
template <typename A>
CKPT_HD A prob_of(A logit, A shift) {
  const A power = kLog2E<A> * (logit - shift);
  return exp2_softmax(power > 127 ? A(127) : power);
}

}  // namespace ckptfused
