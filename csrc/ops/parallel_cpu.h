#pragma once

#include "ops/torch.h"

#include "kernels/cpu/subnormals.h"

namespace ckptfused {

// at::parallel_for whose threads treat subnormals as the caller does. torch.set_flush_denormal acts
// on its thread and on those started later: results would depend on who got which rows.
template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, F f) {
  const SubnormalMode mode = SubnormalMode::of_thread();
  at::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    const SubnormalModeGuard guard(mode);
    f(first, last);
  });
}

}  // namespace ckptfused
