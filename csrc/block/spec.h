#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "block/spec_fields.h"

namespace ckptfused {

// What a block computes, as data. Written by ckptfused/spec/ as one readable string, parsed once
// and cached here. Its fields are those of spec_fields.h.

inline bool drops(const std::vector<AdapterSpec>& adapters) {
  return std::any_of(adapters.begin(), adapters.end(),
                     [](const AdapterSpec& a) { return a.p > 0; });
}

// Where the heads of q, k, v or the gate lie among the columns of the qkv product: `count` heads of
// D columns each, `stride` columns apart, from column `col0` on.
struct HeadColumns {
  int64_t count, col0, stride;
};

// Whether nothing comes after the last product of a half.
inline bool ends_in_product(const HalfSpec& h) {
  return !h.residual && !h.post.on() && !h.out.on() && h.p_res == 0 && h.m == 1.0;
}

struct AttentionSpec : AttentionFields {
  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t joint_width() const { return q_width() + 2 * kv_width(); }
  bool gated() const { return output_gate != "none"; }
  bool gated_by_head() const { return output_gate == "head"; }
  int64_t gate_width() const { return !gated() ? 0 : gated_by_head() ? heads : q_width(); }
  int64_t qkv_width() const { return joint_width() + gate_width(); }
  // Whether the norm of q and k and RoPE are two kernels, not one.
  bool qk_in_steps() const { return qk.on() && qk_place != "head"; }
  HeadColumns q_columns() const { return {heads, 0, gate_in_q ? 2 * head_dim : head_stride()}; }
  HeadColumns k_columns() const {
    return {kv_heads, interleaved ? head_dim : q_product_width(), head_stride()};
  }
  HeadColumns v_columns() const {
    return {kv_heads, interleaved ? 2 * head_dim : q_product_width() + kv_width(), head_stride()};
  }
  // Of the output gate: as wide as a head, or one column each.
  HeadColumns gate_columns() const {
    if (gate_in_q) return {heads, head_dim, 2 * head_dim};
    return {heads, joint_width(), gate_width() / heads};
  }
  int64_t q_product_width() const { return gate_in_q ? 2 * q_width() : q_width(); }

 private:
  int64_t head_stride() const { return interleaved ? 3 * head_dim : head_dim; }
};

struct FFNSpec : FFNFields {
  bool is_gated = false;  // as its activation is

  bool gated() const { return is_gated; }
  int64_t gu_width() const { return gated() ? 2 * hidden : hidden; }
};

struct BlockSpec : BlockFields {
  bool has_attn = false, has_ffn = false;
  AttentionSpec attn;
  FFNSpec ffn;

  bool has_dropout() const {
    return (has_attn && (attn.p_attn > 0 || attn.p_res > 0 || drops(attn.lora))) ||
           (has_ffn && (ffn.p_hidden > 0 || ffn.p_res > 0 || drops(ffn.lora)));
  }
};

// A loss head. Each token's loss by itself leaves nothing for forward to make: what its gradient is
// multiplied by is not known then.
struct LossSpec : LossFields {
  bool per_token() const { return reduction == "none"; }
  bool keep_gradients() const { return keep == "gradients" && !per_token(); }
  bool has_dropout() const { return drops(lora); }
};

// A number of a spec. Not std::stod, which reads "0.1" as 0 in a program whose locale has decimal
// commas.
double to_double(const std::string& value);
// target:form, joined by +
std::vector<QuantizedSpec> parse_quantized(const std::string& value);

// Parses a spec, or finds it among those parsed before. Throws c10::Error on an unknown key or
// value.
std::shared_ptr<const BlockSpec> parse_spec(const std::string& text);
std::shared_ptr<const LossSpec> parse_loss_spec(const std::string& text);

}  // namespace ckptfused
