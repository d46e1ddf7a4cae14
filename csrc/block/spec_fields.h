// Written by `make spec-header` from ckptfused/spec/. Change that, not this.
// clang-format off
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "block/spec_types.h"

namespace ckptfused {

// What both halves share.
struct HalfSpec {
  NormSpec pre{"none", 1e-05};  // Norm of x.
  NormSpec post{"none", 1e-05};  // Norm of what the half adds to x.
  NormSpec out{"none", 1e-05};  // Closing norm, of the sum.
  bool joint = false;  // One tensor holds q, k and v rows (slot q_w), or gate and up rows (gate_w).
  bool transposed = false;  // Weights are stored [in, out] (GPT-2's Conv1D), not [out, in].
  double p_res = 0.0;  // Dropout of what the half adds to x.
  double m = 1.0;  // Factor of what the half adds to x.
  std::vector<AdapterSpec> lora = {};  // Adapters beside projections, in the order of adding.
  std::vector<QuantizedSpec> quant = {};  // Projections whose weights are stored in few bits.
  bool residual = true;  // Whether x is added to what the half makes of it.
  bool modulated = false;  // Vectors of pre and post have a row for each batch element: [B, C] (DiT).
};
// Calls f(key, member) for each field.
template <typename F>
void for_fields(HalfSpec& s, F&& f) {
  f("pre", s.pre.kind);
  f("post", s.post.kind);
  f("out", s.out.kind);
  f("pre_eps", s.pre.eps);
  f("post_eps", s.post.eps);
  f("out_eps", s.out.eps);
  f("joint", s.joint);
  f("transposed", s.transposed);
  f("p_res", s.p_res);
  f("m", s.m);
  f("lora", s.lora);
  f("quant", s.quant);
  f("residual", s.residual);
  f("modulated", s.modulated);
}

// The attention half's own.
struct AttentionFields : HalfSpec {
  int64_t heads = 0;  // Query heads, H.
  int64_t kv_heads = 0;  // Key and value heads, G: a divisor of H.
  int64_t head_dim = 0;  // Width of a head, D: at most MAX_HEAD_DIM.
  bool interleaved = false;  // Joint only: rows are [H, 3, D], of each head q, k and v (GPT-NeoX).
  double scale = 0.0;  // Factor of the logits; None: 1/sqrt(head_dim).
  bool causal = false;  // Key j is hidden from query i where j > i.
  int64_t window = 0;  // Key j is visible where i - j < window (j - i too, not causal); 0: no window.
  double softcap = 0.0;  // Logits become softcap * tanh(logits / softcap); 0: as they are.
  bool sinks = false;  // Each head has a logit of a key beside all others, whose value is 0.
  std::string output_gate = "none";  // Sigmoids of a projection, beside that of q, multiply o: each entry, or each head.
  bool gate_in_q = false;  // Rows of q's tensor are [H, 2, D], of each head q and gate (Qwen3-Next).
  std::string rope = "none";  // How RoPE pairs the entries of a head.
  int64_t rotary_dim = 0;  // RoPE turns the first rotary_dim entries of a head; 0: the whole head.
  NormSpec qk{"none", 1e-05};  // Norm of q and k.
  std::string qk_place = "head";  // What `qk_norm` is of: a head, all heads of q or k as one row, a head that RoPE turned.
  NormSpec v{"none", 1e-05};  // Norm of each head of v, which has no weights (Gemma 4).
  bool q_scale = false;  // The call gives a factor of q for each position (Ministral 3).
  double p_attn = 0.0;  // Dropout of the attention probabilities.
  std::string mask = "none";  // The mask that the call gives.
  std::string padding = "none";  // The padding mask that the call gives.
  bool packed = false;  // The call gives cu_seqlens: x holds sequences one after another.
};
// Calls f(key, member) for each field.
template <typename F>
void for_fields(AttentionFields& s, F&& f) {
  for_fields(static_cast<HalfSpec&>(s), f);
  f("heads", s.heads);
  f("kv_heads", s.kv_heads);
  f("head_dim", s.head_dim);
  f("interleaved", s.interleaved);
  f("scale", s.scale);
  f("causal", s.causal);
  f("window", s.window);
  f("softcap", s.softcap);
  f("sinks", s.sinks);
  f("output_gate", s.output_gate);
  f("gate_in_q", s.gate_in_q);
  f("rope", s.rope);
  f("rotary_dim", s.rotary_dim);
  f("qk_norm", s.qk.kind);
  f("qk_eps", s.qk.eps);
  f("qk_place", s.qk_place);
  f("v_norm", s.v.kind);
  f("v_eps", s.v.eps);
  f("q_scale", s.q_scale);
  f("p_attn", s.p_attn);
  f("mask", s.mask);
  f("padding", s.padding);
  f("packed", s.packed);
}

// The FFN half's own.
struct FFNFields : HalfSpec {
  std::string act = "";  // The activation.
  int64_t hidden = 0;  // Width of the hidden value, F.
  double p_hidden = 0.0;  // Dropout of the hidden value.
};
// Calls f(key, member) for each field.
template <typename F>
void for_fields(FFNFields& s, F&& f) {
  for_fields(static_cast<HalfSpec&>(s), f);
  f("act", s.act);
  f("hidden", s.hidden);
  f("p_hidden", s.p_hidden);
}

// The values that may be kept for backward, in the order in which block_fwd returns them.
struct KeepSpec {
  bool attn = false;  // o and lse
  bool mid = false;  // input of the FFN half, or the sum before the first closing norm
  bool proj = false;  // attention projection before its post-norm
  bool qkv = false;  // raw product of q, k, v and the output gate
  bool gu = false;  // gate and up pre-activations
  bool out = false;  // sum before the closing norm, or the down product before its post-norm
};
template <typename F>
void for_fields(KeepSpec& s, F&& f) {
  f("attn", s.attn);
  f("mid", s.mid);
  f("proj", s.proj);
  f("qkv", s.qkv);
  f("gu", s.gu);
  f("out", s.out);
}

// The block's, beside its halves.
struct BlockFields {
  KeepSpec keep = {};  // What is kept for backward beside x and the random state.
  Parallel parallel = Parallel::no;  // Both halves add to the same x; 'shared': the FFN reads attn.pre's output.
  int64_t scratch = 0;  // Bytes of scratch above which the FFN, and on a CPU attention, goes in tiles; 0: by device.
  bool seq_first = false;  // x is [T, B, C], not [B, T, C].
  c10::ScalarType compute = c10::ScalarType::Undefined;  // Type of the matrix products; None: the type of x.
};
// Calls f(key, member) for each field.
template <typename F>
void for_fields(BlockFields& s, F&& f) {
  f("keep", s.keep);
  f("parallel", s.parallel);
  f("scratch", s.scratch);
  f("seq_first", s.seq_first);
  f("compute", s.compute);
}

// A loss head's.
struct LossFields {
  std::string keep = "gradients";  // What forward makes for backward, or what it keeps.
  std::string reduction = "sum";  // Sum or mean over tokens, or each token's loss.
  int64_t ignore_index = -100;  // A token with this target has no loss.
  double label_smoothing = 0.0;  // Share of the loss spread over all classes.
  double logit_scale = 1.0;  // Factor of the logits.
  double softcap = 0.0;  // Logits become softcap * tanh(logits / softcap); 0: as they are.
  double z_loss = 0.0;  // Factor of lse^2 in a token's loss.
  int64_t scratch = 0;  // Bytes of logits that exist at a time; 0: by device and shape.
  c10::ScalarType compute = c10::ScalarType::Undefined;  // Type of the matrix products; None: the type of x.
  std::vector<AdapterSpec> lora = {};  // Adapters beside the weight, in the order of adding.
  std::vector<QuantizedSpec> quant = {};  // The weight, where it is stored in few bits.
  int64_t classes = 0;  // Classes of a weight that is stored in few bits.
};
// Calls f(key, member) for each field.
template <typename F>
void for_fields(LossFields& s, F&& f) {
  f("keep", s.keep);
  f("reduction", s.reduction);
  f("ignore_index", s.ignore_index);
  f("label_smoothing", s.label_smoothing);
  f("logit_scale", s.logit_scale);
  f("softcap", s.softcap);
  f("z_loss", s.z_loss);
  f("scratch", s.scratch);
  f("compute", s.compute);
  f("lora", s.lora);
  f("quant", s.quant);
  f("classes", s.classes);
}

constexpr ComputeType kComputeTypes[] = {{"float64", c10::ScalarType::Double}, {"float32", c10::ScalarType::Float}, {"bfloat16", c10::ScalarType::BFloat16}, {"float16", c10::ScalarType::Half}};

// Slots of the params list. Absent halves have none. Adapters' follow, then those of quantized weights.
enum AttentionParam : int { kAttnPreW, kAttnPreB, kQW, kQB, kKW, kKB, kVW, kVB, kAttnGateW, kAttnGateB, kQNormW, kQNormB, kKNormW, kKNormB, kOW, kOB, kAttnPostW, kAttnPostB, kAttnOutW, kAttnOutB, kSinks, kAttentionParams };
enum FFNParam : int { kFFNPreW, kFFNPreB, kFFNGateW, kFFNGateB, kUpW, kUpB, kDownW, kDownB, kFFNPostW, kFFNPostB, kFFNOutW, kFFNOutB, kCoefficients, kFFNParams };
enum AdapterParam : int { kA, kB, kBias, kAdapterParams };
enum QuantParam : int { kScale, kOffset, kNestedScale, kTable, kQuantParams };
enum AuxSlot : int { kCos, kSin, kMask, kPadding, kCuSeqlens, kQScale, kAuxSlots };
constexpr const char* kAuxNames[kAuxSlots] = {"cos", "sin", "mask", "padding", "cu_seqlens", "q_scale"};
// The projections that adapters stand beside, with the slots of their weights.
constexpr Projection kAttentionProjections[] = {{"q", kQW}, {"k", kKW}, {"v", kVW}, {"gate", kAttnGateW}, {"o", kOW}};
constexpr Projection kFFNProjections[] = {{"gate", kFFNGateW}, {"up", kUpW}, {"down", kDownW}};

}  // namespace ckptfused
