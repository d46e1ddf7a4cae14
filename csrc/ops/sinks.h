#pragma once

#include "ops/torch.h"

// Attention sinks: each head has a logit of a key that every query sees and whose value is 0. A
// softmax over it as well is the one without, scaled by sigmoid(lse - sink), and its log-sum-exp
// that of both: attention's kernels need not know, for backward reads no more than these two.

namespace ckptfused {

// Scales o for the sinks, in place, and returns the log-sum-exp with them; the memory of lse is
// used up. A row that sees no other key gives o = 0.
// Shapes: o [B, T, H, D]; lse and the result [B, H, T], of the accumulation type; sinks [H].
at::Tensor add_sinks(const at::Tensor& o, const at::Tensor& lse, const at::Tensor& sinks);

// grad = the gradient of the sinks, or grad += it when add: -p(sink) * sum(dout * o) of each row,
// the rows in parts that are a function of shape and device.
// Shapes: grad [H], of the accumulation type; dout, o [B, T, H, D]; lse with the sinks [B, H, T].
void sinks_grad_out(const at::Tensor& grad, const at::Tensor& dout, const at::Tensor& o,
                    const at::Tensor& lse, const at::Tensor& sinks, bool add);

}  // namespace ckptfused
