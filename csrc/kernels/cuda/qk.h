#pragma once

#include <cstdint>

#include "kernels/qk.h"

namespace ckptfused {

// tokens = B * T, of a.heads heads of up to 256 entries each. All return null, or what went wrong.
// stream: a cudaStream_t.
const char* qk_fwd_cuda(const QkFwd& a, int64_t tokens, void* stream);
// partials: scratch, acc [chunks = qk_grad_chunks(...), head_dim] each, or null where that gradient
// is not wanted (dweight / dbias null too).
const char* qk_bwd_cuda(const QkBwd& a, int64_t tokens, int64_t chunks, void* dweight_partials,
                        void* dbias_partials, void* dweight, void* dbias, void* stream);

}  // namespace ckptfused
