#pragma once

#include <cstdint>

#include "kernels/cross_entropy.h"

namespace ckptfused {

// Rows [begin, end) of a call. A target that is no class is the caller's to refuse.
void cross_entropy_fwd_rows(const CrossEntropyFwd& a, int64_t begin, int64_t end);
void cross_entropy_bwd_rows(const CrossEntropyBwd& a, int64_t begin, int64_t end);

}  // namespace ckptfused
