// A look at a module and at all below it, which says whether what was once read there still holds.
#include "ops/torch.h"

#include <algorithm>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using at::Tensor;
using pybind11::handle;
using pybind11::object;

// Larger trees are no layers. It ends the recursion where a module is below itself, too.
constexpr size_t kMostSteps = 4096;

// Of a class: the number that it has until somebody sets an attribute of it or of a base. 0: none.
unsigned version(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030D0000
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}

bool is_of_torch_or_ours(const std::string& name) {
  const std::string top = name.substr(0, name.find('.'));
  return top == "torch" || top == "ckptfused";
}

std::string text_in(PyObject* dict, const char* name) {
  PyObject* found = dict == nullptr ? nullptr : PyDict_GetItemString(dict, name);
  return found && PyUnicode_Check(found) ? pybind11::cast<std::string>(found) : "";
}

bool is_constant(PyObject* value);

bool are_constants(PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    if (!is_constant(PyTuple_GET_ITEM(tuple, i))) return false;
  }
  return true;
}

// Whether a function reaches nothing but its module, and so keeps no model alive.
bool is_plain_function(PyObject* value) {
  if (PyCFunction_Check(value)) {
    PyObject* self = PyCFunction_GET_SELF(value);
    if (self == nullptr || PyModule_Check(self)) return true;
    return PyType_Check(self) &&
           !PyType_HasFeature(reinterpret_cast<PyTypeObject*>(self), Py_TPFLAGS_HEAPTYPE);
  }
  if (!PyFunction_Check(value) || PyFunction_GetClosure(value) != nullptr) return false;
  const auto* function = reinterpret_cast<PyFunctionObject*>(value);
  const bool has_attributes = function->func_dict && PyDict_GET_SIZE(function->func_dict) > 0;
  PyObject* defaults = PyFunction_GetDefaults(value);
  return !has_attributes && PyFunction_GetKwDefaults(value) == nullptr &&
         (defaults == nullptr || are_constants(defaults)) &&
         is_of_torch_or_ours(text_in(PyFunction_GetGlobals(value), "__name__"));
}

// Whether a value is the same for as long as it is the same object.
bool is_constant(PyObject* value) {
  if (PyTuple_Check(value)) return are_constants(value);
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyComplex_CheckExact(value) || PyUnicode_CheckExact(value) ||
         PyBytes_CheckExact(value) || THPDtype_Check(value) || THPDevice_Check(value) ||
         is_plain_function(value);
}

// Whether all that an instance holds is in its __dict__, and all that it does is in its class.
bool is_known_module(PyObject* value) {
  static PyObject* base =
      object(pybind11::module_::import("torch.nn").attr("Module")).release().ptr();
  PyTypeObject* type = Py_TYPE(value);
  if (!PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base))) return false;
  if (Py_TYPE(type) != &PyType_Type) return false;
  const handle cls(reinterpret_cast<PyObject*>(type));
  object(cls.attr("forward"));  // a class has a version once something of its own is looked up
  const object name = cls.attr("__module__");
  return PyUnicode_Check(name.ptr()) && is_of_torch_or_ours(pybind11::cast<std::string>(name)) &&
         version(type) != 0;
}

// The dense tensor of PyTorch's own classes; null for anything else.
const Tensor* plain(PyObject* value) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type != THPVariableClass && type != ParameterClass) return nullptr;
  const Tensor& t = THPVariable_Unpack(value);
  const bool unusual = t.key_set().has(c10::DispatchKey::Python) || t.is_nested() ||
                       t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return unusual ? nullptr : &t;
}

bool is_empty(PyObject* value) {
  return PyAnySet_Check(value) ? PySet_GET_SIZE(value) == 0 : PyDict_GET_SIZE(value) == 0;
}

// The number of a value among those, -1 if it is none of them.
Py_ssize_t position(const std::vector<object>& values, PyObject* value) {
  const auto is_it = [&](const object& other) { return other.ptr() == value; };
  const auto at = std::find_if(values.begin(), values.end(), is_it);
  return at == values.end() ? -1 : at - values.begin();
}

// What was seen at one place of the tree; the entries of a dict or of a module's __dict__ follow.
struct Step {
  enum Kind { ignored, constant, empty, dict, module, tensor };
  Kind kind;
  object key;                    // in the dict around it
  object value;                  // of a constant
  PyTypeObject* type = nullptr;  // of what is empty, and of a tensor
  unsigned version = 0;          // of a module's class
  Py_ssize_t entries = 0;
  std::vector<int64_t> sizes;  // of a tensor
  Py_ssize_t same = -1;        // the tensor, by number, that this one is too
};

// What a tree of modules looks like, whatever its tensors hold. It keeps constants alone alive, no
// module and no tensor: of those it says what they are, and where.
class ModuleGuard {
 public:
  explicit ModuleGuard(pybind11::set unread) : unread_(std::move(unread)) {}

  // Whether the tree is of what is_known_module, is_constant and plain know alone.
  bool look(const handle& module) {
    std::vector<object> seen;
    return is_known_module(module.ptr()) && add(object(), module.ptr(), seen);
  }

  // Remembers where in the tree each of these tensors is. False: it is not there, or the tree is
  // another by now.
  bool place(const handle& module, const pybind11::list& tensors) {
    std::vector<object> found;
    places_.clear();
    if (!holds(module.ptr(), found)) return false;
    for (const handle t : tensors) {
      const Py_ssize_t at = t.is_none() ? -1 : position(found, t.ptr());
      if (!t.is_none() && at < 0) return false;
      places_.push_back(at);
    }
    return true;
  }

  // The tensors that are at these places now, or None where the tree is not as it was.
  object tensors(const handle& module) const {
    std::vector<object> found;
    found.reserve(tensors_);
    if (!holds(module.ptr(), found)) return pybind11::none();
    pybind11::list result(places_.size());
    for (size_t i = 0; i < places_.size(); ++i) {
      result[i] = places_[i] < 0 ? pybind11::none() : found[places_[i]];
    }
    return result;
  }

 private:
  bool add(object key, PyObject* value, std::vector<object>& seen) {
    if (steps_.size() >= kMostSteps) return false;
    if (key && !PyUnicode_CheckExact(key.ptr())) return false;
    const bool ignored = key && unread_.contains(key);
    steps_.push_back({Step::constant, std::move(key), {}});
    Step& step = steps_.back();
    if (ignored) {
      step.kind = Step::ignored;
      return true;
    }
    if (is_constant(value)) {
      step.value = pybind11::reinterpret_borrow<object>(value);
      return true;
    }
    if (const Tensor* t = plain(value)) {
      step.kind = Step::tensor;
      step.type = Py_TYPE(value);
      step.sizes = t->sizes().vec();
      step.same = position(seen, value);
      seen.push_back(pybind11::reinterpret_borrow<object>(value));
      tensors_ = seen.size();
      return true;
    }
    if ((PyODict_CheckExact(value) || PySet_CheckExact(value)) && is_empty(value)) {
      step.kind = Step::empty;
      step.type = Py_TYPE(value);
      return true;
    }
    if (PyDict_CheckExact(value)) {
      step.kind = Step::dict;
      return add_entries(steps_.size() - 1, value, seen);
    }
    if (!is_known_module(value)) return false;
    step.kind = Step::module;
    step.version = version(Py_TYPE(value));
    return add_entries(steps_.size() - 1, attributes(value).ptr(), seen);
  }

  bool add_entries(size_t step, PyObject* dict, std::vector<object>& seen) {
    steps_[step].entries = PyDict_GET_SIZE(dict);
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value)) {
      if (!add(pybind11::reinterpret_borrow<object>(key), value, seen)) return false;
    }
    return true;
  }

  // Whether the tree is as it was, and its tensors in the order of the steps. Owned: a dict that is
  // made on the way may start a collection, whose finalizers do anything.
  bool holds(PyObject* module, std::vector<object>& found) const {
    size_t step = 0;
    return holds_at(step, module, found);
  }

  bool holds_at(size_t& at, PyObject* value, std::vector<object>& found) const {
    const Step& step = steps_[at++];
    switch (step.kind) {
      case Step::ignored:
        return true;
      case Step::constant:
        return value == step.value.ptr();
      case Step::empty:
        return Py_TYPE(value) == step.type && is_empty(value);
      case Step::dict:
        return PyDict_CheckExact(value) && hold(step, at, value, found);
      case Step::module:
        return version(Py_TYPE(value)) == step.version &&
               hold(step, at, attributes(value).ptr(), found);
      case Step::tensor: {
        const Tensor* t = Py_TYPE(value) == step.type ? plain(value) : nullptr;
        if (!t || t->sizes() != at::IntArrayRef(step.sizes)) return false;
        if (step.same >= 0 && found[step.same].ptr() != value) return false;
        found.push_back(pybind11::reinterpret_borrow<object>(value));
        return true;
      }
    }
    return false;
  }

  bool hold(const Step& step, size_t& at, PyObject* dict, std::vector<object>& found) const {
    if (PyDict_GET_SIZE(dict) != step.entries) return false;
    Py_ssize_t next = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &next, &key, &value)) {
      if (key != steps_[at].key.ptr() || !holds_at(at, value, found)) return false;
    }
    return true;
  }

  static object attributes(PyObject* module) {
    return pybind11::reinterpret_steal<object>(PyObject_GenericGetDict(module, nullptr));
  }

  pybind11::set unread_;
  std::vector<Step> steps_;
  size_t tensors_ = 0;
  std::vector<Py_ssize_t> places_;
};

}  // namespace

void bind_module_guard(pybind11::module_& m) {
  pybind11::class_<ModuleGuard>(m, "ModuleGuard")
      .def(pybind11::init<pybind11::set>())
      .def("look", &ModuleGuard::look)
      .def("place", &ModuleGuard::place)
      .def("tensors", &ModuleGuard::tensors);
}
