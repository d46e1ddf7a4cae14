#pragma once

#include <cstdint>

#include "math/dropout.h"

namespace ckptfused {

// keep[(row - begin) * cols + c] = whether element (row, c) of a [rows, cols] tensor is kept.
void dropout_mask_rows(const Dropout& dropout, int64_t cols, int64_t begin, int64_t end,
                       bool* keep);

}  // namespace ckptfused
