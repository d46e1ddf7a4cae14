#pragma once

#include <cstdint>

#include "kernels/qk.h"

namespace ckptfused {

// Tokens b*T + t in [begin, end).
void qk_fwd_rows(const QkFwd& a, int64_t begin, int64_t end);

// The norm's gradients are added to dweight and dbias, [D] acc, where these are not null.
void qk_bwd_rows(const QkBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias);

}  // namespace ckptfused
