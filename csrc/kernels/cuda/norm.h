#pragma once

#include <cstdint>

#include "kernels/norm.h"

namespace ckptfused {

// Tensors are [rows, a.cols] on the device. All return null, or what went wrong. stream: a
// cudaStream_t. multiprocessors: the device's; no result depends on them.
const char* norm_fwd_cuda(const NormFwd& a, int64_t rows, int64_t multiprocessors, void* stream);

// dweight, dbias: [cols] acc, overwritten; either may be null. Their partials: scratch, acc
// [chunks, cols] each, null where the gradient is. chunks: as row_grad_chunks says.
const char* norm_bwd_cuda(const NormBwd& a, int64_t rows, int64_t chunks, void* dweight_partials,
                          void* dbias_partials, void* dweight, void* dbias, void* stream);

}  // namespace ckptfused
