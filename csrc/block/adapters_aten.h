#pragma once

#include <string_view>

#include "ops/adapters.h"

namespace ckptfused {

// high = t in its type, rest = what that leaves, in float16 times 2048. t: of a wider type.
void split_into(const at::Tensor& t, const at::Tensor& high, const at::Tensor& rest);

// out = drop(t), which may be t, by an open gate (below); "kept" leaves out the scale, "reglu" does
// not.
void drop(const at::Tensor& out, const at::Tensor& t, const at::Tensor& gate, std::string_view act,
          const Adapter& adapter, const AdapterPlace& place, int64_t row);
at::Tensor open_gate(const at::Tensor& like, at::ScalarType type, int64_t width);
// out = scale · a @ b, or out += it, of operands of one type; out has it too, and is rounded once,
// or is float32 where they are of half precision.
void scaled_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double scale,
                    bool onto);

// ops/adapters.h on any device, through PyTorch's products: what the CPU functions there compute,
// in float32 with temporaries of a few thousand rows; adapters in halves as below.
void adapters_fwd_aten(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place);
void adapters_bwd_aten(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                       const Adapters& adapters, const AdapterPlace& place);

// Adapters in halves are multiplied in half precision with float32 sums; what is `rank` wide and
// multiplied again is two halves there, so that it has 16 bits, in float16 22.
void adapters_fwd_halves(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                         const AdapterPlace& place);
void adapters_bwd_halves(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                         const Adapters& adapters, const AdapterPlace& place);

}  // namespace ckptfused
