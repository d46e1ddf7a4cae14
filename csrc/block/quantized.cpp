// Weights that are stored in few bits: dequantized for a product, and freed with it.
#include "ops/torch.h"

#include <algorithm>

#include "block/block.h"
#include "block/tiles.h"

namespace ckptfused {

using at::Tensor;

// Of both halves, with the slots beside them, which come last of all.
void Block::find_quantized() {
  int slot = int(params_.size() - quantized_params());
  const auto add = [&](const std::vector<QuantizedSpec>& list, int first) {
    for (const QuantizedSpec& spec : list) {
      const int weight = first + spec.weight;
      TORCH_CHECK(params_[weight].defined() && params_[slot + kScale].defined(),
                  "ckptfused: the quantized weight of ", spec.target, " needs codes and scales");
      TORCH_CHECK(!params_[weight].requires_grad(), "ckptfused: the quantized weight of ",
                  spec.target, " cannot be trained");
      quantized_.push_back({&spec, weight, slot});
      slot += kQuantParams;
    }
  };
  if (spec_.has_attn) add(spec_.attn.quant, attn_slot(0));
  if (spec_.has_ffn) add(spec_.ffn.quant, ffn_slot(0));
}

size_t Block::quantized_params() const {
  const size_t attn = spec_.has_attn ? spec_.attn.quant.size() : 0;
  const size_t ffn = spec_.has_ffn ? spec_.ffn.quant.size() : 0;
  return kQuantParams * (attn + ffn);
}

const Block::QuantizedSlots* Block::quantized(int slot) const {
  const auto found = std::find_if(quantized_.begin(), quantized_.end(),
                                  [&](const QuantizedSlots& q) { return q.weight == slot; });
  return found == quantized_.end() ? nullptr : &*found;
}

std::vector<int64_t> Block::weight_sizes(int slot) const {
  if (quantized(slot) == nullptr) return params_[slot].sizes().vec();
  if (slot < ffn_slot(0)) {
    const AttentionSpec& a = spec_.attn;
    if (slot == kOW) return {C_, a.q_width()};
    if (slot == kAttnGateW) return {a.gate_width(), C_};
    return {slot != kQW ? a.kv_width() : a.joint ? a.joint_width() : a.q_product_width(), C_};
  }
  const FFNSpec& f = spec_.ffn;
  if (slot == ffn_slot(kDownW)) return {C_, f.hidden};
  return {slot == ffn_slot(kFFNGateW) && f.joint ? f.gu_width() : f.hidden, C_};
}

bool Block::numbers_fit(int first) const {
  int64_t count = 0;
  for (const QuantizedSlots& stored : quantized_) {
    if (stored.weight >= first) count += c10::multiply_integers(weight_sizes(stored.weight));
  }
  return count * int64_t(c10::elementSize(P_)) <= scratch_limit(spec_.scratch, !on_cpu(x_));
}

Tensor Block::dequantized(const QuantizedSlots& stored) {
  Tensor& held = cast_[stored.weight];
  if (held.defined()) return held;
  const Ledger::Name named("weight of", stored.weight);
  OptTensorList state;
  for (int slot = 0; slot < kQuantParams; ++slot) {
    state.push_back(call::opt(params_[stored.first + slot]));
  }
  const Tensor& codes = params_[stored.weight];
  const Tensor made =
      call::dequantize(codes, state, stored.spec->form, weight_sizes(stored.weight), P_);
  counted_launch("dequantize", int64_t(codes.nbytes() + made.nbytes()));
  if (stored.weight >= held_from_) held = made;
  return made;
}

}  // namespace ckptfused
