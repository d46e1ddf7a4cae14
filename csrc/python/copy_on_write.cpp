// What Python's checkpoint has of copies on write and of version counters.
#include "ops/torch.h"

#include <unordered_set>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd/made_copies.h"

namespace {

using ckptfused::MadeCopies;

bool has_attributes(const pybind11::handle& value) {
  PyObject** held = _PyObject_GetDictPtr(value.ptr());
  return held != nullptr && *held != nullptr && PyDict_GET_SIZE(*held) > 0;
}

// In the place of each tensor its copy, or None where there is nothing to share: of subclasses, and
// what MadeCopies leaves. And the places where Python has more to do: those, and of tensors with
// attributes.
std::pair<std::vector<std::optional<at::Tensor>>, std::vector<size_t>> make(
    MadeCopies& copies, const pybind11::list& tensors) {
  std::vector<std::optional<at::Tensor>> shared;
  shared.reserve(tensors.size());
  for (const pybind11::handle t : tensors) {
    const bool exact = THPVariable_CheckExact(t.ptr());
    const bool shares = exact && MadeCopies::can_share(THPVariable_Unpack(t.ptr()));
    shared.emplace_back(shares ? std::optional(THPVariable_Unpack(t.ptr())) : std::nullopt);
  }
  auto made = copies.make(shared);
  std::vector<size_t> unfinished;
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i] || has_attributes(tensors[i])) unfinished.push_back(i);
  }
  return {std::move(made), std::move(unfinished)};
}

// Whether all are dense tensors in this memory that stand for no others, made outside of inference
// mode.
bool ordinary(const pybind11::list& tensors) {
  for (const pybind11::handle t : tensors) {
    if (!THPVariable_Check(t.ptr())) return false;
    const at::Tensor& x = THPVariable_Unpack(t.ptr());
    const bool stands_for_another = x.key_set().has(c10::DispatchKey::Python);
    if (stands_for_another || !x.is_cpu() || x.is_nested() || x.layout() != at::kStrided ||
        x.is_inference()) {
      return false;
    }
  }
  return true;
}

// Whether two of the tensors lie in one storage; subclasses, and what has none, lie in none.
bool share_memory(const pybind11::list& tensors) {
  std::unordered_set<const c10::StorageImpl*> storages;
  for (const pybind11::handle t : tensors) {
    if (!THPVariable_CheckExact(t.ptr())) continue;
    const at::Tensor& x = THPVariable_Unpack(t.ptr());
    if (!x.key_set().has_all(c10::DispatchKeySet(c10::DispatchKey::Dense)) || !x.has_storage()) {
      continue;
    }
    if (!storages.insert(x.storage().unsafeGetStorageImpl()).second) return true;
  }
  return false;
}

// The number of writes to each tensor that autograd knows; None for one that was made in inference
// mode, and for what is no tensor.
pybind11::list write_counts(const pybind11::list& tensors) {
  pybind11::list counts(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const pybind11::handle t = tensors[i];
    const bool counted = THPVariable_Check(t.ptr()) && !THPVariable_Unpack(t.ptr()).is_inference();
    counts[i] = counted ? pybind11::cast(THPVariable_Unpack(t.ptr())._version()) : pybind11::none();
  }
  return counts;
}

pybind11::object original(const MadeCopies& copies, pybind11::object value) {
  if (!THPVariable_Check(value.ptr())) return value;
  const auto found = copies.original(THPVariable_Unpack(value.ptr()));
  return found ? pybind11::cast(*found) : value;
}

// Tensors as a node of the graph holds them: the hooks for saved tensors see them.
class SavedTensors {
 public:
  explicit SavedTensors(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& t : tensors) saved_.emplace_back(t, /*is_output=*/false);
  }
  std::vector<at::Tensor> unpack() const {
    std::vector<at::Tensor> tensors;
    for (const torch::autograd::SavedVariable& saved : saved_) tensors.push_back(saved.unpack());
    return tensors;
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace

void bind_copy_on_write(pybind11::module_& m) {
  pybind11::class_<MadeCopies>(m, "CopiesOnWrite")
      .def(pybind11::init<>())
      .def("make", &make)
      .def("original", &original)
      .def("any_left", &MadeCopies::any_left)
      .def("forget", &MadeCopies::forget);
  pybind11::class_<SavedTensors>(m, "SavedTensors")
      .def(pybind11::init<const std::vector<at::Tensor>&>())
      .def("unpack", &SavedTensors::unpack);
  m.def("share_memory", &share_memory);
  m.def("ordinary", &ordinary);
  m.def("write_counts", &write_counts);
  pybind11::class_<ckptfused::VersionCounters>(m, "VersionCounters")
      .def(pybind11::init<const std::vector<at::Tensor>&>())
      .def("now", &ckptfused::VersionCounters::now);
}
