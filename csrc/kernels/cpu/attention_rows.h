#pragma once

// Pieces of the attention row kernels that are the same for every instruction set.

#include <cmath>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/rows.h"
#include "math/elementary.h"
#include "math/softmax.h"

namespace ckptfused {

// The largest of start and x; NaN is passed over.
template <typename A>
CKPT_HD A lane_max(const A* x, int64_t n, A start) {
  constexpr int kLanes = 128 / int(sizeof(A));
  A lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = start;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  }
  for (int l = 0; i < n; ++l, ++i) lane[l] = x[i] > lane[l] ? x[i] : lane[l];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lane[l] = lane[l] > lane[l + half] ? lane[l] : lane[l + half];
  }
  return lane[0];
}

// x = exp(x - shift); returns the sum.
template <typename A>
CKPT_HD A exp_row(A* x, int64_t n, A shift) {
  return lane_sum<A>(n, [&](int64_t i) CKPT_INLINE { return x[i] = exp_acc(x[i] - shift); });
}

template <typename T>
CKPT_HD acc_t<T> dot_row(const acc_t<T>* x, const T* y, int64_t n) {
  return lane_sum<acc_t<T>>(n, [&](int64_t i) CKPT_INLINE { return x[i] * to_acc(y[i]); });
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
      for (int64_t i = 0; i < tile.cols; ++i) row[i] = 0;
      add_mask_row(rule.mask, tile.query + r, tile.key, tile.cols, row);
      add_mask_row(rule.padding, tile.query + r, tile.key, tile.cols, row);
    }
    CKPT_IVDEP
    for (int64_t i = begin; i < end; ++i) logits[i] = masked_logit(logits[i], row[i]);
  }
};

// The columns of a tile that row r sees by position; the others are set to 0.
template <typename A>
CKPT_HD KeyRange clip_row(const AttentionRule& rule, const ScoreTile& tile, int64_t r, A* scores) {
  const KeyRange keys = visible_keys(tile.query + r, rule.keys, rule.causal, rule.window);
  int64_t begin = keys.begin - tile.key, end = keys.end - tile.key;
  end = end < 0 ? 0 : (end > tile.cols ? tile.cols : end);
  begin = begin < 0 ? 0 : (begin > end ? end : begin);
  for (int64_t i = 0; i < begin; ++i) scores[i] = 0;
  for (int64_t i = end; i < tile.cols; ++i) scores[i] = 0;
  return {begin, end};
}

}  // namespace ckptfused
