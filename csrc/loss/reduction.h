#pragma once

#include "ops/torch.h"

namespace ckptfused {

// The number of targets that are not ignored: an int where their values are at hand, otherwise (on
// a device, under a mode, of tensors that stand for others) a tensor. Counted for a CPU it is an
// int, of which only the kind matters there.
at::IValue number_of_targets(const at::Tensor& target, int64_t ignored);

// t by a count, or by `least` where that is more. Without any target that counts a mean is NaN; its
// gradients are divided by 1 and are 0, as PyTorch's are, not 0 times inf.
at::Tensor divided(const at::Tensor& t, const at::IValue& count, int64_t least);

// What a call returns of each token's losses. count: None where the loss is no mean.
at::Tensor reduced(const at::Tensor& token_loss, bool per_token, const at::IValue& count);

// grad *= dloss, one number, which is not rounded to grad's type.
void scale_gradient(const at::Tensor& grad, const at::Tensor& dloss);

}  // namespace ckptfused
