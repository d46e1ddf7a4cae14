#pragma once

#include "ops/torch.h"

namespace ckptfused {

// sum = the sums of in's columns, or sum += them when add.
// Shapes: sum [C], in [N, C]. sum has in's dtype, or is its float32 accumulator: PyTorch copies a
// half-precision tensor to float32 whole before it sums on a CPU, so that it is given part by part
// there. The parts are a function of shape, dtype and device.
void column_sums_out(at::Tensor sum, const at::Tensor& in, bool add);

}  // namespace ckptfused
