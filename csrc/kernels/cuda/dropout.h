#pragma once

#include <cstdint>

#include "math/dropout.h"

namespace ckptfused {

// keep[row * cols + c] = whether element (row, c) of a [rows, cols] tensor is kept. rng_state: its
// (seed, offset) on the device, null where the dropout is not active. Returns null, or what went
// wrong. stream: a cudaStream_t.
const char* dropout_mask_cuda(const Dropout& d, const int64_t* rng_state, int64_t rows,
                              int64_t cols, bool* keep, void* stream);

}  // namespace ckptfused
