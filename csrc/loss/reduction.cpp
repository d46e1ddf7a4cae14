#include "ops/torch.h"

#include "loss/reduction.h"

#include <algorithm>

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "ops/ledger.h"

namespace ckptfused {

using at::Tensor;

namespace {

// Whether a tensor's values can be read here: it lies in this memory, stands for no other, and no
// mode wants to see what is done with it.
bool at_hand(const Tensor& t) {
  constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView});
  const auto ordinary = plain | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  return ordinary.has_all(t.key_set()) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// One number by another, in its type: PyTorch would first make tensors of the second.
template <typename T>
Tensor quotient(const Tensor& t, int64_t by) {
  Tensor made = at::empty({}, t.options());
  *made.mutable_data_ptr<T>() = *t.const_data_ptr<T>() / T(by);
  return made;
}

}  // namespace

at::IValue number_of_targets(const Tensor& target, int64_t ignored) {
  const bool is_long = target.scalar_type() == at::kLong;
  if (is_long && target.is_meta() && counting() && on_cpu(target)) return target.numel();
  if (!is_long || !at_hand(target)) return target.ne(ignored).sum();
  const Tensor dense = target.contiguous();
  const int64_t* first = dense.const_data_ptr<int64_t>();
  return dense.numel() - std::count(first, first + dense.numel(), ignored);
}

Tensor divided(const Tensor& t, const at::IValue& count, int64_t least) {
  if (count.isInt()) {
    const int64_t by = std::max(count.toInt(), least);
    const bool graph = at::GradMode::is_enabled() && t.requires_grad();
    if (t.dim() == 0 && !graph && at_hand(t)) {
      if (t.scalar_type() == at::kFloat) return quotient<float>(t, by);
      if (t.scalar_type() == at::kDouble) return quotient<double>(t, by);
    }
    return t.div(at::Scalar(by));
  }
  return t.div(least > 0 ? count.toTensor().clamp_min(least) : count.toTensor());
}

Tensor reduced(const Tensor& token_loss, bool per_token, const at::IValue& count) {
  if (per_token) return token_loss.clone();
  const Tensor sum = token_loss.sum();
  return count.isNone() ? sum : divided(sum, count, 0);
}

void scale_gradient(const Tensor& grad, const Tensor& dloss) {
  const bool cpu = on_cpu(dloss);
  const double factor = dloss.is_cpu() ? dloss.item<double>() : 0;  // counted: of no memory
  if (cpu && factor == 1.0) return;
  if (grad.element_size() >= 4) {
    grad.mul_(dloss);
    return;
  }
  // As a tensor the factor would first be rounded to the gradient's type; of a device reading it
  // would wait.
  if (cpu) {
    grad.mul_(factor);
    return;
  }
  constexpr int64_t kElements = int64_t(1) << 24;
  const Tensor flat = grad.view({-1});
  for (int64_t i = 0; i < flat.numel(); i += kElements) {
    const Tensor part = flat.narrow(0, i, std::min(kElements, flat.numel() - i));
    part.copy_(part.to(at::kFloat).mul_(dloss));
  }
}

}  // namespace ckptfused
