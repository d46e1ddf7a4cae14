#pragma once

#include <cstdint>

#include "kernels/norm.h"

namespace ckptfused {

// Tensors are [rows, a.cols] on the device. All return null, or what went wrong. stream: a
// cudaStream_t. multiprocessors: the device's; no result depends on them.
const char* norm_fwd_cuda(const NormFwd& a, int64_t rows, int64_t multiprocessors, void* stream);

// dweight, dbias: acc [chunks, cols], overwritten by the sums over as many runs of rows; either may
// be null. row_grad_chunks says how many suit the device.
const char* norm_bwd_cuda(const NormBwd& a, int64_t rows, int64_t chunks, void* dweight,
                          void* dbias, void* stream);

}  // namespace ckptfused
