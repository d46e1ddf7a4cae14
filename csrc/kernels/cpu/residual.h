#pragma once

#include <cstdint>

#include "kernels/residual.h"

namespace ckptfused {

// Rows [begin, end) of [N, C] tensors; false, and gradients of the post norm, as in norm.h.

bool residual_fwd_rows(const ResidualFwd& a, int64_t begin, int64_t end);
bool residual_bwd_rows(const ResidualBwd& a, int64_t begin, int64_t end, void* dweight,
                       void* dbias);

}  // namespace ckptfused
