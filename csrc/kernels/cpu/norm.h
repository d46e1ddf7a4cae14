#pragma once

#include <cstdint>

#include "kernels/norm.h"

namespace ckptfused {

// Rows [begin, end) of [N, C] tensors. A dtype pair is one of for_row_types (rows.h); the functions
// return false for any other.

bool norm_fwd_rows(const NormFwd& a, int64_t begin, int64_t end);

// The weight's and bias's gradients are added to dweight and dbias, [C] acc, where these are not
// null.
bool norm_bwd_rows(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias);

// out[c] = partials[0][c] + partials[1][c] + ... for c in [begin, end); partials [count, cols] and
// out [cols] are acc, double if wide.
void sum_partials(bool wide, const void* partials, int64_t count, int64_t cols, void* out,
                  int64_t begin, int64_t end);

}  // namespace ckptfused
