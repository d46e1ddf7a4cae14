// A quick look at the tensors of a call, so that Python asks them one by one, and says what is
// amiss, only where something is.
#include "ops/torch.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using at::Tensor;
using pybind11::handle;

// The dense tensor that stands for no other; null for anything else.
const Tensor* plain(const handle& value) {
  if (!THPVariable_Check(value.ptr())) return nullptr;
  const Tensor& t = THPVariable_Unpack(value.ptr());
  const bool stands_for_another = t.key_set().has(c10::DispatchKey::Python);
  return stands_for_another || t.layout() != at::kStrided ? nullptr : &t;
}

bool is_compute_type(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

pybind11::object wrap(const Tensor& t) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t));
}

// Whether Python's checks of these arguments of linear_cross_entropy would find nothing. They find
// nothing, too, in calls of which this is not sure: with types that autocast makes one, say.
bool loss_arguments_fit(const handle& x_, const handle& weight_, const handle& target_,
                        const handle& bias, const handle& class_weight) {
  const Tensor *x = plain(x_), *weight = plain(weight_), *target = plain(target_);
  if (!x || !weight || !target) return false;
  const bool shaped = x->dim() >= 1 && weight->dim() == 2 && weight->size(0) > 0 &&
                      x->size(-1) == weight->size(1) &&
                      target->sizes() == x->sizes().slice(0, x->dim() - 1);
  const bool typed = is_compute_type(x->scalar_type()) &&
                     weight->scalar_type() == x->scalar_type() &&
                     target->scalar_type() == at::kLong;
  const auto is_vector = [&](const handle& value, bool trained) {
    if (value.is_none()) return true;
    const Tensor* t = plain(value);
    return t && t->dim() == 1 && t->size(0) == weight->size(0) && t->device() == x->device() &&
           t->is_floating_point() &&
           (trained || !t->requires_grad() || !at::GradMode::is_enabled());
  };
  return shaped && typed && weight->device() == x->device() && target->device() == x->device() &&
         is_vector(bias, true) && is_vector(class_weight, false);
}

// Calls of ops past the schemas by which PyTorch reads Python's arguments, which takes longer than
// a small op. They return None where a mode or class of somebody's may want to see the call.
using Optional = std::optional<Tensor>;
using OptionalList = c10::List<Optional>;
using OptionalGenerator = std::optional<at::Generator>;

template <typename Signature>
auto op_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether nothing but the dispatcher has a say in what is done with it.
bool is_own(const handle& t) {
  return t.is_none() || THPVariable_CheckExact(t.ptr());
}

bool are_own(const pybind11::list& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), is_own);
}

Optional optional(const handle& t) {
  return t.is_none() ? Optional() : Optional(THPVariable_Unpack(t.ptr()));
}

OptionalList list_of(const pybind11::list& tensors) {
  OptionalList list;
  list.reserve(tensors.size());
  for (const handle& t : tensors) list.push_back(optional(t));
  return list;
}

// linear_cross_entropy without adapters, of arguments that fit.
pybind11::object linear_cross_entropy(const handle& x, const handle& weight, const handle& bias,
                                      const handle& target, const handle& class_weight,
                                      const std::string& spec) {
  using Result = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static const auto op =
      op_of<Result(const Tensor&, const Tensor&, const Optional&, const Tensor&, const Optional&,
                   const OptionalList&, std::string_view, const OptionalGenerator&)>(
          "ckptfused::linear_cross_entropy");
  if (at::impl::torch_function_mode_enabled() || !is_own(x) || !is_own(weight) || !is_own(target) ||
      !is_own(bias) || !is_own(class_weight)) {
    return pybind11::none();
  }
  const Optional b = optional(bias), w = optional(class_weight);
  const Tensor &x_ = THPVariable_Unpack(x.ptr()), &weight_ = THPVariable_Unpack(weight.ptr());
  const Tensor& target_ = THPVariable_Unpack(target.ptr());
  const auto [loss, each, lse, predicted] = [&] {
    const pybind11::gil_scoped_release release;
    return op.call(x_, weight_, b, target_, w, OptionalList(), spec, {});
  }();
  return pybind11::make_tuple(wrap(loss), wrap(each), wrap(lse), wrap(predicted));
}

// A block op by its name, without a generator.
pybind11::object call_block(const std::string& name, const handle& x, const pybind11::list& slots,
                            const pybind11::list& aux, const std::string& spec) {
  using Block = Tensor(const Tensor&, const OptionalList&, const OptionalList&, std::string_view,
                       const OptionalGenerator&);
  static const auto block = op_of<Block>("ckptfused::block"),
                    attention = op_of<Block>("ckptfused::attention_block"),
                    ffn = op_of<Block>("ckptfused::ffn_block");
  const auto& op = name == "block" ? block : name == "ffn_block" ? ffn : attention;
  if (at::impl::torch_function_mode_enabled() || !is_own(x) || !are_own(slots) || !are_own(aux)) {
    return pybind11::none();
  }
  const Tensor& x_ = THPVariable_Unpack(x.ptr());
  const OptionalList params = list_of(slots), beside = list_of(aux);
  return wrap([&] {
    const pybind11::gil_scoped_release release;
    return op.call(x_, params, beside, spec, {});
  }());
}

// What the slots of a block call take.
class ExpectedTensors {
 public:
  // Of each slot the shape, -1 for the first size of x, and the kind as Python's `Expected` has it;
  // "" takes anything.
  using Slot = std::tuple<std::vector<int64_t>, std::string>;
  explicit ExpectedTensors(std::vector<Slot> slots) : slots_(std::move(slots)) {}

  // As loss_arguments_fit.
  bool fit(const handle& x_, const pybind11::list& tensors) const {
    const Tensor* x = plain(x_);
    if (!x || tensors.size() != slots_.size()) return false;
    for (size_t i = 0; i < slots_.size(); ++i) {
      const auto& [shape, kind] = slots_[i];
      const handle value = tensors[i];
      if (value.is_none() || kind.empty()) continue;
      const Tensor* t = plain(value);
      const bool typed =
          t && (kind == "norm" ? t->is_floating_point() : t->scalar_type() == x->scalar_type());
      if (!typed || !is_of(*t, shape, x->size(0)) || t->device() != x->device()) return false;
    }
    return true;
  }

 private:
  static bool is_of(const Tensor& t, at::IntArrayRef shape, int64_t batch) {
    return std::equal(
        shape.begin(), shape.end(), t.sizes().begin(), t.sizes().end(),
        [&](int64_t wanted, int64_t size) { return size == (wanted < 0 ? batch : wanted); });
  }
  std::vector<Slot> slots_;
};

}  // namespace

void bind_arguments(pybind11::module_& m) {
  m.def("loss_arguments_fit", &loss_arguments_fit);
  m.def("linear_cross_entropy", &linear_cross_entropy);
  m.def("call_block", &call_block);
  pybind11::class_<ExpectedTensors>(m, "ExpectedTensors")
      .def(pybind11::init<std::vector<ExpectedTensors::Slot>>())
      .def("fit", &ExpectedTensors::fit);
}
