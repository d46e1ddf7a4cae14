#pragma once

#include "math/elementary.h"

namespace ckptfused {

// The loss of one row of logits and its gradient, an element at a time. With l the logits after
// scale and soft-cap, w the class weights (1 where there are none), W their sum, t the target:
//   loss = w_t (1 - s) (lse - l_t) + s/V (W lse - sum_c w_c l_c) + z lse^2
// s: label smoothing; z: z-loss (de Brébisson & Vincent 2016; PaLM, Chowdhery et al. 2022).

// From a product of the head to its logit: l = x * scale, or cap * tanh(x * scale / cap). Where
// kMayCap is false, softcap is 0: a loop then carries no tanh.
template <typename A, bool kMayCap = true>
struct LogitMap {
  A scale, softcap;  // softcap 0: none

  CKPT_HD A value(A x) const {
    const A scaled = x * scale;
    if constexpr (!kMayCap) return scaled;
    return softcap != A(0) ? softcap * tanh_acc(scaled / softcap) : scaled;
  }
  // dl/dx, given l.
  CKPT_HD A slope(A l) const {
    if constexpr (!kMayCap) return scale;
    const A t = softcap != A(0) ? l / softcap : A(0);
    return scale * (A(1) - t * t);
  }
};

// What the terms of a row's gradient are multiplied by:
//   dloss/dl_c = softmax_c * all - w_c * smooth - [c = t] * target
template <typename A>
struct RowGradient {
  A all, smooth, target;
};

// weight: w_t; smooth: s/V; factor: what the row's loss is multiplied by.
template <typename A>
CKPT_HD RowGradient<A> row_gradient(A weight, A smoothing, A smooth, A weight_sum, A z_loss, A lse,
                                    A factor) {
  const A own = weight * (A(1) - smoothing);
  return {factor * (own + smooth * weight_sum + A(2) * z_loss * lse), factor * smooth,
          factor * own};
}

}  // namespace ckptfused
