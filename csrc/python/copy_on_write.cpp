// What Python's checkpoint has of copies on write and of version counters.
#include "ops/torch.h"

#include <algorithm>

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
std::pair<pybind11::list, std::vector<size_t>> make(MadeCopies& copies,
                                                    const pybind11::list& tensors) {
  std::vector<at::Tensor> shared;
  shared.reserve(tensors.size());
  std::vector<bool> shares;
  for (const pybind11::handle t : tensors) {
    const bool exact = THPVariable_CheckExact(t.ptr());
    shares.push_back(exact && MadeCopies::can_share(THPVariable_Unpack(t.ptr())));
    if (shares.back()) shared.push_back(THPVariable_Unpack(t.ptr()));
  }
  const std::vector<at::Tensor> made = copies.make(shared);
  pybind11::list all(tensors.size());
  std::vector<size_t> unfinished;
  auto next = made.begin();
  for (size_t i = 0; i < tensors.size(); ++i) {
    all[i] = shares[i] ? pybind11::cast(*next++) : pybind11::none();
    if (!shares[i] || has_attributes(tensors[i])) unfinished.push_back(i);
  }
  return {std::move(all), std::move(unfinished)};
}

// Whether all are tensors of no subclass but nn.Parameter, and no two of them the same.
bool distinct(const pybind11::list& values) {
  std::vector<PyObject*> tensors;
  tensors.reserve(values.size());
  for (const pybind11::handle value : values) {
    if (!THPVariable_CheckExact(value.ptr())) return false;
    tensors.push_back(value.ptr());
  }
  std::sort(tensors.begin(), tensors.end());
  return std::adjacent_find(tensors.begin(), tensors.end()) == tensors.end();
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
  std::vector<const c10::StorageImpl*> storages;
  storages.reserve(tensors.size());
  for (const pybind11::handle t : tensors) {
    if (!THPVariable_CheckExact(t.ptr())) continue;
    const at::Tensor& x = THPVariable_Unpack(t.ptr());
    if (!x.key_set().has_all(c10::DispatchKeySet(c10::DispatchKey::Dense)) || !x.has_storage()) {
      continue;
    }
    storages.push_back(x.storage().unsafeGetStorageImpl());
  }
  std::sort(storages.begin(), storages.end());
  return std::adjacent_find(storages.begin(), storages.end()) != storages.end();
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

// Tensors as a node of the graph holds them: the hooks for saved tensors see them. And their
// versions.
class SavedTensors {
 public:
  explicit SavedTensors(const std::vector<at::Tensor>& tensors) : counters_(tensors) {
    saved_.reserve(tensors.size());
    for (const at::Tensor& t : tensors) saved_.emplace_back(t, /*is_output=*/false);
  }
  auto changed() const { return counters_.changed(); }
  std::vector<at::Tensor> unpack() const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(saved_.size());
    for (const torch::autograd::SavedVariable& saved : saved_) tensors.push_back(saved.unpack());
    return tensors;
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  ckptfused::VersionCounters counters_;
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
      .def("changed", &SavedTensors::changed)
      .def("unpack", &SavedTensors::unpack);
  m.def("distinct", &distinct);
  m.def("share_memory", &share_memory);
  m.def("ordinary", &ordinary);
  m.def("write_counts", &write_counts);
  pybind11::class_<ckptfused::VersionCounters>(m, "VersionCounters")
      .def(pybind11::init<const std::vector<at::Tensor>&>())
      .def("now", &ckptfused::VersionCounters::now);
}
