#pragma once

#include <cstdint>

#include "kernels/residual.h"

namespace ckptfused {

// Tensors are [rows, a.cols] on the device. rng_state: its (seed, offset), null where the dropout
// is not active. All return null, or what went wrong. stream: a cudaStream_t.
// multiprocessors: the device's; no result depends on them.
const char* residual_fwd_cuda(const ResidualFwd& a, const int64_t* rng_state, int64_t rows,
                              int64_t multiprocessors, void* stream);

// The gradients of the post norm's parameters as in norm_bwd_cuda (kernels/cuda/norm.h).
const char* residual_bwd_cuda(const ResidualBwd& a, const int64_t* rng_state, int64_t rows,
                              int64_t chunks, void* dweight, void* dbias, void* stream);

}  // namespace ckptfused
