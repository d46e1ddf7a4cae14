#include "ops/torch.h"

#include "autograd/made_copies.h"

#include <c10/core/impl/COW.h>

#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

bool spans_little(const Tensor& x) {
  const size_t bytes = x.element_size();
  return x.is_contiguous() ||
         at::detail::computeStorageNbytes(x.sizes(), x.strides(), bytes, 0) <= 2 * x.nbytes();
}

}  // namespace

bool MadeCopies::can_share(const Tensor& x) {
  static const auto ordinary =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta,
                           c10::DispatchKey::ADInplaceOrView}) |
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  // A copy of all that lies between its elements would otherwise be the larger one.
  return ordinary.has_all(x.key_set()) && (counting() || !x.is_meta()) && x.numel() > 0 &&
         spans_little(x);
}

std::vector<std::optional<Tensor>> MadeCopies::make(
    const std::vector<std::optional<Tensor>>& tensors) {
  std::vector<Tensor> shared;
  for (const auto& x : tensors) {
    if (x) shared.push_back(*x);
  }
  std::vector<std::optional<Tensor>> made(tensors.size());
  if (shared.empty()) return made;
  auto [copies, guard] = call_copy_on_write(shared);
  guards_.push_back(std::move(guard));
  size_t next = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]) continue;
    Tensor& copy = copies[next++];
    made_.insert_or_assign(copy.unsafeGetTensorImpl(),
                           Made{c10::weak_intrusive_ptr<at::TensorImpl>(copy.getIntrusivePtr()),
                                *tensors[i], State(copy)});
    made[i] = std::move(copy);
  }
  return made;
}

std::optional<Tensor> MadeCopies::original(const Tensor& value) const {
  const auto found = made_.find(value.unsafeGetTensorImpl());
  if (found == made_.end()) return std::nullopt;
  // An address may be another tensor's by now; while a weak reference stands it is not.
  const Made& made = found->second;
  const bool shares =
      value.is_meta() || c10::impl::cow::is_cow_data_ptr(value.storage().data_ptr());
  return shares && made.state == State(value) ? std::optional(made.original) : std::nullopt;
}

bool MadeCopies::any_left() const {
  for (const auto& [_, made] : made_) {
    if (made.copy.use_count() > 0) return true;
  }
  return false;
}

MadeCopies::State::State(const Tensor& t)
    : version(t.is_inference() ? -1 : int64_t(t._version())),
      grad_fn(t.grad_fn()),
      requires_grad(t.requires_grad()),
      dtype(t.scalar_type()),
      sizes(t.sizes()),
      strides(t.strides()),
      offset(t.storage_offset()) {}

bool MadeCopies::State::operator==(const State& other) const {
  return version == other.version && grad_fn == other.grad_fn &&
         requires_grad == other.requires_grad && dtype == other.dtype && sizes == other.sizes &&
         strides == other.strides && offset == other.offset;
}

VersionCounters::VersionCounters(const std::vector<Tensor>& tensors) {
  for (const Tensor& t : tensors) {
    counters_.push_back(torch::autograd::impl::version_counter(t));
  }
}

std::vector<std::optional<int64_t>> VersionCounters::now() const {
  std::vector<std::optional<int64_t>> found;
  for (const c10::VariableVersion& counter : counters_) {
    found.push_back(counter.enabled() ? std::optional<int64_t>(counter.current_version())
                                      : std::nullopt);
  }
  return found;
}

}  // namespace ckptfused
