#pragma once

#include "ops/torch.h"

#include <vector>

#include "block/ops.h"
#include "block/spec.h"
#include "ops/adapters.h"

namespace ckptfused {

// Of the tensors that gradients are asked for, in this order; a, b and bias of each adapter follow.
enum LossSlot : int { kLossX, kLossWeight, kLossBias, kLossAdapters };

// The tensors of a call: x, weight, bias, then a, b and bias of each adapter; where the weight is
// codes, the tensors beside these come last.
struct LossTensors {
  at::Tensor x, weight, bias, target, class_weight;
  std::vector<at::Tensor> adapters;  // undefined where absent
  at::Tensor rng;
};

// A call of a loss head: logits exist a piece at a time.
class LossHead {
 public:
  LossHead(const LossSpec& spec, const LossTensors& tensors, const std::vector<bool>& needs);

  // Each token's loss, log-sum-exp and largest logit's class, then the gradients, for a loss that
  // is the sum, where they are kept.
  std::vector<at::Tensor> forward();

  // Gradients for dloss, [...] as target or one number, as they are kept (gradients()).
  std::vector<at::Tensor> backward(const at::Tensor& dloss, const at::Tensor& lse);

 private:
  bool need(int slot) const { return needs_[slot]; }
  int64_t logit_size() const { return int64_t(c10::elementSize(P_)); }
  // How many rows of logits exist at a time, and of slices how many of their columns: all of them
  // where cutting would not lower the total with the sums that it brings. Functions of shape, type,
  // device and limit alone. sums: whether the gradient that is added up is asked for.
  int64_t row_step(bool sums) const;
  int64_t col_step(bool sums) const;
  int64_t scratch(int64_t logits_each) const;
  void make_gradients(bool whole_x, bool whole_weight);
  void logits(const at::Tensor& out, const at::Tensor& x, int64_t row0, int64_t col0);
  void add_gradients(const at::Tensor& dlogits, const at::Tensor& x, int64_t row0, int64_t col0,
                     bool first_of_x, bool first_of_weight);
  void zero_products();
  at::Tensor logits_buffer(int64_t rows, int64_t cols) const;
  int64_t row_stride(int64_t cols) const;
  at::Tensor matrix(const at::Tensor& buffer, int64_t rows, int64_t cols) const;
  Adapters adapters(int64_t col0, int64_t cols, bool gradients);
  std::vector<at::Tensor> gradients();
  call::LossArgs args() const;
  at::Tensor numbers(const std::vector<at::Tensor>& beside) const;
  at::Tensor empty(at::IntArrayRef size, at::ScalarType type) const {
    return at::empty(size, tensors_.x.options().dtype(type));
  }

  const LossSpec& spec_;
  LossTensors tensors_;
  std::vector<bool> needs_;
  std::vector<int64_t> target_sizes_;
  int64_t N_, C_, V_;
  at::ScalarType P_, A_;          // compute, accumulation
  at::Tensor x_, weight_, bias_;  // [N, C] as given; weight and bias in the compute type
  at::Tensor class_weight_;       // A [V + 1], the last one their sum
  std::vector<at::Tensor> sums_;  // gradients, in the type in which they are added up
};

}  // namespace ckptfused
