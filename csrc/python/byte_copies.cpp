// The bytes of many small tensors, copied before a call and compared after it.
#include "ops/torch.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include <ATen/EmptyTensor.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "ops/checks.h"

namespace {

bool is_dense(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_nested() && t.has_storage() &&
         !t.key_set().has(c10::DispatchKey::Python);
}

// Whether its bytes lie in this memory, one after the other, and are its values; of no graph.
bool has_plain_bytes(const at::Tensor& t) {
  return is_dense(t) && t.is_cpu() && !t.requires_grad() && !t.is_inference() &&
         !t.is_quantized() && !t.is_conj() && !t.is_neg() && t.is_non_overlapping_and_dense() &&
         ckptfused::has_memory(t);
}

// Whether it can be read, as far as can be said: what stands for other tensors knows that itself.
bool is_readable(const at::Tensor& t) {
  return !is_dense(t) || ckptfused::has_memory(t);
}

// Whether all are such tensors of at most so many bytes.
bool all_small(const pybind11::list& tensors, size_t limit) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const pybind11::handle value) {
    if (!THPVariable_Check(value.ptr())) return false;
    const at::Tensor& t = THPVariable_Unpack(value.ptr());
    return has_plain_bytes(t) && t.nbytes() <= limit;
  });
}

// One memory for all: a call costs one allocation, however many tensors there are. Of tensors above
// the limit, and of those without plain bytes, there is no copy.
class ByteCopies {
 public:
  ByteCopies(const std::vector<at::Tensor>& tensors, size_t limit) {
    copies_.reserve(tensors.size());
    for (const at::Tensor& t : tensors) {
      if (!has_plain_bytes(t) || t.nbytes() > limit) {
        copies_.emplace_back();
        continue;
      }
      copies_.push_back(Copy{t, c10::DimVector(t.sizes()), c10::DimVector(t.strides()),
                             t.scalar_type(), 0, t.nbytes()});
    }
    // The widest types first: each copy begins at a multiple of its own, without a gap.
    size_t end = 0;
    for (size_t width = kWidest; width > 0; width /= 2) {
      for (auto& copy : copies_) {
        if (!copy || copy->of.element_size() != int64_t(width)) continue;
        copy->place = end;
        end += copy->size;
      }
    }
    bytes_ = at::detail::empty_cpu({static_cast<int64_t>(end)}, at::kByte);
    for (const auto& copy : copies_) {
      if (copy) std::memcpy(bytes(*copy), copy->of.const_data_ptr(), copy->size);
    }
  }

  // The tensors of which there are copies, and that have other values or shapes now.
  std::vector<size_t> differing() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (copies_[i] && !is_same(*copies_[i])) found.push_back(i);
    }
    return found;
  }

  // The values that the i-th tensor had, where there is a copy.
  std::optional<at::Tensor> of(size_t i) const {
    const std::optional<Copy>& copy = copies_.at(i);
    if (!copy) return std::nullopt;
    const at::AutoDispatchBelowAutograd no_graph;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    const at::Tensor bytes = bytes_.narrow(0, copy->place, copy->size);
    return bytes.view(copy->type).as_strided(copy->sizes, copy->strides);
  }

 private:
  struct Copy {
    at::Tensor of;
    c10::DimVector sizes, strides;
    at::ScalarType type;
    size_t place, size;
  };
  static constexpr size_t kWidest = sizeof(c10::complex<double>);
  bool is_same(const Copy& copy) const {
    const at::Tensor& t = copy.of;
    return t.sizes() == copy.sizes && t.strides() == copy.strides && t.scalar_type() == copy.type &&
           has_plain_bytes(t) && std::memcmp(bytes(copy), t.const_data_ptr(), copy.size) == 0;
  }
  uint8_t* bytes(const Copy& copy) const { return bytes_.mutable_data_ptr<uint8_t>() + copy.place; }

  std::vector<std::optional<Copy>> copies_;
  at::Tensor bytes_;
};

}  // namespace

void bind_byte_copies(pybind11::module_& m) {
  pybind11::class_<ByteCopies>(m, "ByteCopies")
      .def(pybind11::init<const std::vector<at::Tensor>&, size_t>())
      .def("differing", &ByteCopies::differing)
      .def("of", &ByteCopies::of);
  m.def("is_readable", &is_readable);
  m.def("all_small", &all_small);
}
