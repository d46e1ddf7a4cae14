#pragma once

#include <cstdint>

#include "kernels/norm.h"
#include "kernels/sum_grads.h"

namespace ckptfused {

// Rows [begin, end) of [N, C] tensors. A dtype pair is one of for_row_types (rows.h); the functions
// return false for any other.

bool norm_fwd_rows(const NormFwd& a, int64_t begin, int64_t end);

// The weight's and bias's gradients are added to dweight and dbias, [C] acc, where these are not
// null.
bool norm_bwd_rows(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias);

// Columns [begin, end) of a sum over chunks of type acc, f64 or f32.
void sum_grads_cols(const GradSum& s, DType acc, int64_t begin, int64_t end);

}  // namespace ckptfused
