#pragma once

#include "ops/adapters.h"

namespace ckptfused {

// ops/adapters.h on any device, through PyTorch's products: what the CPU functions there compute,
// with temporaries of a few thousand rows.
void adapters_fwd_aten(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place);
void adapters_bwd_aten(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                       const Adapters& adapters, const AdapterPlace& place);

}  // namespace ckptfused
