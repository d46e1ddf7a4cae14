#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "math/macros.h"

namespace ckptfused {

// The least scale for kernels that hide keys, or look for a row's largest logit, before they
// multiply by it in float32 (PyTorch's do): below 0 the order turns round and -inf becomes inf, and
// at what counts as 0 there it becomes NaN.
inline constexpr double kLeastScale = std::numeric_limits<float>::min();

// Keys [begin, end) of a row of scores, possibly none.
struct KeyRange {
  int64_t begin, end;
};

// The keys that a query may see by position alone: j <= i when causal, i - j < window and, when
// not causal, j - i < window (window 0: no limit). Both ends grow with the query.
CKPT_HD KeyRange visible_keys(int64_t query, int64_t keys, bool causal, int64_t window) {
  int64_t end = causal ? query + 1 : (window > 0 ? query + window : keys);
  if (end > keys) end = keys;
  int64_t begin = window > 0 ? query - window + 1 : 0;
  if (begin < 0) begin = 0;
  return {begin < end ? begin : end, end};
}

// What is taken off a row's logits before exp: their maximum or log-sum-exp, but 0 for a row that
// is masked throughout (-inf), whose probabilities then come out as 0 instead of NaN.
template <typename A>
CKPT_HD A softmax_shift(A reference) {
  return reference == A(-INFINITY) ? A(0) : reference;
}

// A logit with a mask's term added. -inf masks whatever the logit is, NaN and +inf too.
template <typename A>
CKPT_HD A masked_logit(A logit, A bias) {
  return bias == A(-INFINITY) ? bias : logit + bias;
}

}  // namespace ckptfused
