#pragma once

#include <cstdint>

#include "kernels/activation.h"

namespace ckptfused {

// [rows, a.cols] on the device. rng_state: its (seed, offset), null where the dropout is not
// active. All return null, or what went wrong. stream: a cudaStream_t.
const char* activation_fwd_cuda(const ActivationFwd& a, const int64_t* rng_state, int64_t rows,
                                void* stream);
const char* activation_bwd_cuda(const ActivationBwd& a, const int64_t* rng_state, int64_t rows,
                                void* stream);

}  // namespace ckptfused
