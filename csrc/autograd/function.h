#pragma once

#include "ops/torch.h"

#include <algorithm>
#include <atomic>
#include <string>

// What the autograd Functions of blocks and of the loss head share.

namespace ckptfused {

// Around the ops' work. A result is no view of our scratch to autograd; and what they call has its
// types already, where a backward runs inside an autocast region.
struct OpGuard {
  explicit OpGuard(const at::Tensor& x) : device(x.device()) {}

  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_autocast{c10::autocast_dispatch_keyset};
  c10::OptionalDeviceGuard device;
};

// Forward-mode AD and torch.func.jvp. The ops have no rule for it and would drop the tangent.
inline bool any_has_tangent(const torch::autograd::variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return t._fw_grad(/*level=*/0).defined(); });
}

// A fresh number for rng_state: of two equal draws, common-subexpression elimination makes one.
inline int64_t next_call_id() {
  static std::atomic<int64_t> counter{0};
  return counter++;
}

// The text with autocast's type as that of the products, where x has another.
inline std::string with_compute_type(const at::Tensor& x, std::string_view spec,
                                     at::ScalarType type) {
  std::string text(spec);
  if (x.scalar_type() == at::kDouble || x.scalar_type() == type) return text;
  return text + (type == at::kBFloat16 ? " compute=bfloat16" : " compute=float16");
}

}  // namespace ckptfused
