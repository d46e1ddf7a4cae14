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
  std::vector<at::Tensor> make(const std::vector<at::Tensor>& tensors);
  // The tensor that a copy was made of, if that copy is as it was made.
  std::optional<at::Tensor> original(const at::Tensor& value) const;
  // Whether one of the copies still exists.
  bool any_left() const;
  // The copies stay, and go on sharing; which are whose is no longer known.
  void forget();

 private:
  // What changes where a tensor is written, or becomes another view or another tensor to autograd.
  struct State {
    explicit State(const at::Tensor& t);
    bool operator==(const State& other) const;

    int64_t version;
    GradFn grad_fn;
    bool requires_grad;
    int64_t offset;
  };
  struct Made {
    const at::TensorImpl* address;
    c10::weak_intrusive_ptr<at::TensorImpl> copy;
    at::Tensor original;
    State state;
  };

  std::vector<at::Tensor> guards_;
  std::vector<Made> made_;
  // Where in made_ a copy is: none before the first question.
  mutable std::unordered_map<const at::TensorImpl*, size_t> places_;
};

// The version counters of tensors without the tensors.
class VersionCounters {
 public:
  explicit VersionCounters(const std::vector<at::Tensor>& tensors);
  // Nothing for one that was made in inference mode.
  using Version = std::optional<int64_t>;
  std::vector<Version> now() const;
  // The first one with another version than when this was made: its place, that, and the version
  // now.
  std::optional<std::tuple<size_t, Version, Version>> changed() const;

 private:
  std::vector<c10::VariableVersion> counters_;
  std::vector<Version> versions_;
};

}  // namespace ckptfused
