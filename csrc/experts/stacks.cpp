// The weights of one expert: as they are, or of a stack in few bits as numbers.
#include "ops/torch.h"

#include "block/ops.h"
#include "experts/experts.h"
#include "ops/ledger.h"

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

std::array<int64_t, 2> Experts::weight_sizes(int i) const {
  const int64_t wide = I_ * (spec_.gated() ? 2 : 1);
  const std::array<int64_t, 2> out_in = i == kExpertsUp ? std::array{wide, C_} : std::array{C_, I_};
  return spec_.transposed ? std::array{out_in[1], out_in[0]} : out_in;
}

Tensor Experts::weight(int i, int64_t expert) {
  if (spec_.form(i).empty()) {
    return slot(i).select(0, expert).to(P_).contiguous();
  }
  Tensor& held = numbers_[i == kExpertsDown];
  if (!held.defined()) held = dequantized(i, expert);
  return held;
}

Tensor Experts::dequantized(int i, int64_t expert) const {
  OptTensorList state;
  for (int beside = 0; beside < kQuantParams; ++beside) {
    state.push_back(call::opt(slot(experts_state(i) + beside)));
  }
  const auto sizes = weight_sizes(i);
  const Tensor made =
      call::dequantize(slot(i), state, spec_.form(i), sizes, P_, expert * sizes[0] * sizes[1]);
  counted_launch("dequantize", int64_t(slot(i).nbytes() / E_ + made.nbytes()));
  return made;
}

}  // namespace ckptfused
