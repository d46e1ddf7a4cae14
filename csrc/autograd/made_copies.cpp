#include "ops/torch.h"

#include "autograd/made_copies.h"

#include <c10/core/impl/COW.h>

#include <algorithm>

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

std::vector<Tensor> MadeCopies::make(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return {};
  auto [copies, guard] = call_copy_on_write(tensors);
  guards_.push_back(std::move(guard));
  places_.clear();
  made_.reserve(made_.size() + copies.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& copy = copies[i];
    made_.push_back({copy.unsafeGetTensorImpl(),
                     c10::weak_intrusive_ptr<at::TensorImpl>(copy.getIntrusivePtr()), tensors[i],
                     State(copy)});
  }
  return std::move(copies);
}

void MadeCopies::forget() {
  places_.clear();
  made_.clear();
}

std::optional<Tensor> MadeCopies::original(const Tensor& value) const {
  if (places_.empty()) {
    // An address may be another tensor's by now; while a weak reference stands it is not.
    for (size_t i = 0; i < made_.size(); ++i) places_[made_[i].address] = i;
  }
  const auto found = places_.find(value.unsafeGetTensorImpl());
  if (found == places_.end()) return std::nullopt;
  const Made& made = made_[found->second];
  const Tensor& original = made.original;
  const bool shares =
      value.is_meta() || c10::impl::cow::is_cow_data_ptr(value.storage().data_ptr());
  const bool same_view = value.scalar_type() == original.scalar_type() &&
                         value.sizes() == original.sizes() && value.strides() == original.strides();
  return shares && same_view && made.state == State(value) ? std::optional(original) : std::nullopt;
}

bool MadeCopies::any_left() const {
  for (const Made& made : made_) {
    if (made.copy.use_count() > 0) return true;
  }
  return false;
}

MadeCopies::State::State(const Tensor& t)
    : version(t.is_inference() ? -1 : int64_t(t._version())),
      grad_fn(t.grad_fn()),
      requires_grad(t.requires_grad()),
      offset(t.storage_offset()) {}

bool MadeCopies::State::operator==(const State& other) const {
  return version == other.version && grad_fn == other.grad_fn &&
         requires_grad == other.requires_grad && offset == other.offset;
}

VersionCounters::VersionCounters(const std::vector<Tensor>& tensors) {
  counters_.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    counters_.push_back(torch::autograd::impl::version_counter(t));
  }
  versions_ = now();
}

std::vector<VersionCounters::Version> VersionCounters::now() const {
  std::vector<Version> found;
  found.reserve(counters_.size());
  for (const c10::VariableVersion& counter : counters_) {
    found.push_back(counter.enabled() ? Version(counter.current_version()) : std::nullopt);
  }
  return found;
}

std::optional<std::tuple<size_t, VersionCounters::Version, VersionCounters::Version>>
VersionCounters::changed() const {
  const std::vector<Version> found = now();
  const auto [before, after] = std::mismatch(versions_.begin(), versions_.end(), found.begin());
  if (before == versions_.end()) return std::nullopt;
  return std::tuple(size_t(before - versions_.begin()), *before, *after);
}

}  // namespace ckptfused
