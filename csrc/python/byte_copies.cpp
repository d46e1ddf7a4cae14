// The bytes of many small tensors, copied before a call and compared after it.
#include "ops/torch.h"

#include <cstring>
#include <optional>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace {

// Whether its bytes lie in this memory, one after the other, and are its values; of no graph.
bool has_plain_bytes(const at::Tensor& t) {
  return !t.requires_grad() && !t.is_inference() && t.is_cpu() && t.layout() == at::kStrided &&
         !t.is_nested() && t.has_storage() && !t.key_set().has(c10::DispatchKey::Python) &&
         !t.is_conj() && !t.is_neg() && t.is_non_overlapping_and_dense() &&
         t.unsafeGetTensorImpl()->data() != nullptr;
}

// One memory for all: a call costs one allocation, however many tensors there are. Of tensors above
// the limit, and of those without plain bytes, there is no copy.
class ByteCopies {
 public:
  ByteCopies(const std::vector<at::Tensor>& tensors, size_t limit) {
    size_t end = 0;
    copies_.reserve(tensors.size());
    for (const at::Tensor& t : tensors) {
      if (t.nbytes() > limit || !has_plain_bytes(t)) {
        copies_.emplace_back();
        continue;
      }
      copies_.push_back(Copy{t, c10::DimVector(t.sizes()), c10::DimVector(t.strides()),
                             t.scalar_type(), end, t.nbytes()});
      end += (t.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
    }
    bytes_ = at::detail::empty_cpu({static_cast<int64_t>(end)}, at::kByte);
    for (const auto& copy : copies_) {
      if (copy) std::memcpy(bytes(*copy), copy->of.const_data_ptr(), copy->size);
    }
  }

  // The tensors of which there are copies, and that have other bytes now.
  std::vector<size_t> differing() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (copies_[i] && !has_same_bytes(*copies_[i])) found.push_back(i);
    }
    return found;
  }

  // The values that the i-th tensor had, where there is a copy.
  std::optional<at::Tensor> of(size_t i) const {
    const std::optional<Copy>& copy = copies_.at(i);
    if (!copy) return std::nullopt;
    const at::NoGradGuard no_graph;
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
  static constexpr size_t kAlignment = 64;
  bool has_same_bytes(const Copy& copy) const {
    return copy.of.nbytes() == copy.size && has_plain_bytes(copy.of) &&
           std::memcmp(bytes(copy), copy.of.const_data_ptr(), copy.size) == 0;
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
  m.def("has_plain_bytes", &has_plain_bytes);
}
