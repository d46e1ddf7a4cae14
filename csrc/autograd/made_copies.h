#pragma once

#include "ops/torch.h"

#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ckptfused {

// A shared_ptr up to PyTorch 2.11, an intrusive_ptr since.
using GradFn = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// The op copy_on_write: copies, and a tensor without values with which the sharing ends.
using SharingCopies = std::tuple<std::vector<at::Tensor>, at::Tensor>;
SharingCopies call_copy_on_write(at::TensorList tensors);

// Copies of tensors over the memory of these, which they share until they are written, or until
// this ends. It knows which of them are still as they were made.
class MadeCopies {
 public:
  // Whether x is a view of a storage on a CPU or a CUDA device and nothing else, and no large part
  // of what lies between its elements is not its own. In a count of the meta device, too.
  static bool can_share(const at::Tensor& x);
  // In the place of each tensor its copy.
  std::vector<std::optional<at::Tensor>> make(
      const std::vector<std::optional<at::Tensor>>& tensors);
  // The tensor that a copy was made of, if that copy is as it was made.
  std::optional<at::Tensor> original(const at::Tensor& value) const;
  // Whether one of the copies still exists.
  bool any_left() const;
  // The copies stay, and go on sharing; which are whose is no longer known.
  void forget() { made_.clear(); }

 private:
  // What changes where a tensor is written, or becomes another view or another tensor to autograd.
  struct State {
    explicit State(const at::Tensor& t);
    bool operator==(const State& other) const;

    int64_t version;
    GradFn grad_fn;
    bool requires_grad;
    at::ScalarType dtype;
    at::DimVector sizes, strides;
    int64_t offset;
  };
  struct Made {
    c10::weak_intrusive_ptr<at::TensorImpl> copy;
    at::Tensor original;
    State state;
  };

  std::vector<at::Tensor> guards_;
  std::unordered_map<at::TensorImpl*, Made> made_;
};

// The version counters of tensors without the tensors.
class VersionCounters {
 public:
  explicit VersionCounters(const std::vector<at::Tensor>& tensors);
  // Nothing for one that was made in inference mode.
  std::vector<std::optional<int64_t>> now() const;

 private:
  std::vector<c10::VariableVersion> counters_;
};

}  // namespace ckptfused
