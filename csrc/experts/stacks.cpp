// The weights of a group's experts, as they are or of a stack in few bits as numbers, and products.
#include "ops/torch.h"

#include "block/ops.h"
#include "experts/experts.h"
#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

int experts_state(int weight) {
  return weight == kExpertsUp ? kExpertsUpState : kExpertsDownState;
}

std::string_view ExpertsSpec::form(int slot) const {
  const std::string_view target = slot == kExpertsUp ? "up" : slot == kExpertsDown ? "down" : "";
  for (const QuantizedSpec& stack : quant) {
    if (stack.target == target) return stack.form;
  }
  return {};
}

std::array<int64_t, 2> Experts::matrix_sizes(int i) const {
  if (i != kExpertsUp && i != kExpertsDown) return {slot(i).size(1), slot(i).size(2)};
  const int64_t wide = I_ * (spec_.gated() ? 2 : 1);
  const std::array<int64_t, 2> out_in = i == kExpertsUp ? std::array{wide, C_} : std::array{C_, I_};
  return spec_.transposed ? std::array{out_in[1], out_in[0]} : out_in;
}

Tensor Experts::weight(int i, const Group& group) {
  if (spec_.form(i).empty()) {
    const Tensor stack = slot(i).narrow(0, group.expert, group.experts).to(P_).contiguous();
    return group.single() ? stack[0] : stack;
  }
  if (i == kExpertsDown) return dequantized(i, group);  // which one product reads
  if (!up_numbers_.defined()) up_numbers_ = dequantized(i, group);
  return up_numbers_;
}

Tensor Experts::dequantized(int i, const Group& group) const {
  OptTensorList state;
  for (int beside = 0; beside < kQuantParams; ++beside) {
    state.push_back(call::opt(slot(experts_state(i) + beside)));
  }
  const auto [rows, columns] = matrix_sizes(i);
  std::vector<int64_t> sizes = {rows, columns};
  if (!group.single()) sizes.insert(sizes.begin(), group.experts);
  const Tensor made =
      call::dequantize(slot(i), state, spec_.form(i), sizes, P_, group.expert * rows * columns);
  const int64_t codes = int64_t(slot(i).nbytes()) / E_ * group.experts;
  counted_launch("dequantize", codes + int64_t(made.nbytes()));
  return made;
}

Tensor Experts::bias(int i, const Group& group) const {
  if (group.single()) return slot(i)[group.expert].to(P_).contiguous();
  return slot(i).index_select(0, expert_.narrow(0, group.first, group.count)).to(P_);
}

void Experts::multiply(int i, const Tensor& out, const Tensor& in, const Group& group, bool back,
                       bool add) {
  const bool transposed = (i == kExpertsUp || i == kExpertsDown) && spec_.transposed;
  const Tensor stored = weight(i, group);
  const Tensor factor = back != transposed ? stored : stored.transpose(-2, -1);
  if (group.single()) return matmul_out(out, in, factor, add);
  const Tensor made = grouped_product(in, factor, group.bounds);
  add ? out.add_(made) : out.copy_(made);
}

void Experts::add_product(int i, const Tensor& a, const Tensor& b, const Group& group) {
  if (group.single()) return matmul_out(sums_[i], a, b, !group.begins);
  grads_[i].narrow(0, group.expert, group.experts).copy_(grouped_product(a, b, group.bounds));
}

}  // namespace ckptfused
