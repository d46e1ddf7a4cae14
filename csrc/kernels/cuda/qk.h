#pragma once

#include <cstdint>

#include "kernels/qk.h"

namespace ckptfused {

// tokens = B * T, of heads of up to 256 entries each. A part may be without the norm that others
// have. All return null, or what went wrong. stream: a cudaStream_t.
const char* qk_fwd_cuda(const QkParts<QkFwd>& parts, int64_t tokens, void* stream);
// grads: of each part.
const char* qk_bwd_cuda(const QkParts<QkBwd>& parts, const QkGrads* grads, int64_t tokens,
                        void* stream);

}  // namespace ckptfused
