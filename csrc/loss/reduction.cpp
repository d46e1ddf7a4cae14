#include "ops/torch.h"

#include "loss/reduction.h"

#include <algorithm>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "ops/ledger.h"

namespace ckptfused {

using at::Tensor;

at::IValue number_of_targets(const Tensor& target, int64_t ignored) {
  const bool is_long = target.scalar_type() == at::kLong;
  if (is_long && target.is_meta() && counting() && on_cpu(target)) return target.numel();
  constexpr c10::DispatchKeySet at_hand({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView});
  const auto ordinary = at_hand | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  if (!ordinary.has_all(target.key_set()) || !is_long ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return target.ne(ignored).sum();
  }
  const Tensor dense = target.contiguous();
  const int64_t* first = dense.const_data_ptr<int64_t>();
  return dense.numel() - std::count(first, first + dense.numel(), ignored);
}

Tensor divided(const Tensor& t, const at::IValue& count, int64_t least) {
  if (count.isInt()) return t.div(at::Scalar(std::max(count.toInt(), least)));
  return t.div(least > 0 ? count.toTensor().clamp_min(least) : count.toTensor());
}

Tensor reduced(const Tensor& token_loss, bool per_token, const at::IValue& count) {
  if (per_token) return token_loss.clone();
  const Tensor sum = token_loss.sum();
  return count.isNone() ? sum : divided(sum, count, 0);
}

}  // namespace ckptfused
