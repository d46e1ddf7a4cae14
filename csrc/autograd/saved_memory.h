#pragma once

#include "ops/torch.h"

namespace ckptfused {

// Where the memory of tensors is that a Function saves, for its saved_data. A leaf is saved as
// itself: `t.data = …` gives it other memory without a version, and backward would read that.
at::IValue places_of(const torch::autograd::variable_list& saved);

// Raises where a saved tensor, as it comes back, has other memory than it had. One that DeepSpeed
// gathers anew for each use (ZeRO-3) may.
void check_places(const torch::autograd::variable_list& saved, const at::IValue& before);

}  // namespace ckptfused
