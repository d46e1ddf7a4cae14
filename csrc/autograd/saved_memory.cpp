// Tensors that get other memory between forward and backward.
#include "autograd/saved_memory.h"

#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/custom_class.h>

namespace ckptfused {
namespace {

using at::Tensor;

// Weak references: nothing else gets their addresses while they are held.
struct Memory : torch::CustomClassHolder {
  struct Place {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  std::vector<std::pair<size_t, Place>> places;
};

// A leaf of plain memory. Others are saved as what they were, which nobody can reach.
bool is_saved_as_itself(const Tensor& t) {
  const c10::DispatchKeySet others({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                    c10::DispatchKey::FuncTorchBatched});
  return t.defined() && t.is_leaf() && t.has_storage() && !t.key_set().has_any(others);
}

c10::weak_intrusive_ptr<c10::StorageImpl> storage_of(const Tensor& t) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(t.storage().getWeakStorageImpl());
}

bool is_partitioned(const Tensor& t) {
  const pybind11::gil_scoped_acquire gil;
  const auto wrapped = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t));
  const auto found = pybind11::module_::import("ckptfused.compat.torch_distributed");
  return found.attr("is_partitioned")(wrapped).cast<bool>();
}

}  // namespace

at::IValue places_of(const torch::autograd::variable_list& saved) {
  auto found = c10::make_intrusive<Memory>();
  found->places.reserve(saved.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    if (!is_saved_as_itself(saved[i])) continue;
    found->places.push_back({i,
                             {c10::weak_intrusive_ptr<c10::TensorImpl>(saved[i].getIntrusivePtr()),
                              storage_of(saved[i])}});
  }
  return at::IValue::make_capsule(std::move(found));
}

void check_places(const torch::autograd::variable_list& saved, const at::IValue& before) {
  const auto found = c10::static_intrusive_pointer_cast<Memory>(before.toCapsule());
  for (const auto& [i, place] : found->places) {
    const c10::intrusive_ptr<c10::TensorImpl> itself = place.tensor.lock();
    if (!itself || !saved[i].has_storage()) continue;
    const auto* const now = itself->unsafe_storage().unsafeGetStorageImpl();
    if (now == place.storage._unsafe_get_target()) continue;
    // Else hooks have kept what it was.
    const bool read = saved[i].storage().unsafeGetStorageImpl() == now;
    TORCH_CHECK(
        !read || is_partitioned(Tensor(itself)), "ckptfused: a tensor ", saved[i].sizes(),
        " of type ", saved[i].scalar_type(),
        " that backward reads got other memory since forward (`t.data = …`",
        ", a move of the model, an evaluation that packs 4-bit weights): run backward first");
  }
}

}  // namespace ckptfused
