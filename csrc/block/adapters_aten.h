#pragma once

#include "ops/adapters.h"

namespace ckptfused {

// high = t in its type, rest = what that leaves. t: of a wider type.
void split_into(const at::Tensor& t, const at::Tensor& high, const at::Tensor& rest);

// ops/adapters.h on any device, through PyTorch's products: what the CPU functions there compute,
// in float32 with temporaries of a few thousand rows. An adapter in halves is multiplied in half
// precision with float32 sums; what is `rank` wide and multiplied again is two halves there, so
// that it has 16 bits.
void adapters_fwd_aten(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place);
void adapters_bwd_aten(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                       const Adapters& adapters, const AdapterPlace& place);

}  // namespace ckptfused
