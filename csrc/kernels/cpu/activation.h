#pragma once

#include <cstdint>

#include "kernels/activation.h"

namespace ckptfused {

// Rows [begin, end) of the part that a call covers.
void activation_fwd_rows(const ActivationFwd& a, int64_t begin, int64_t end);
void activation_bwd_rows(const ActivationBwd& a, int64_t begin, int64_t end);

}  // namespace ckptfused
