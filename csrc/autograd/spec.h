#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace ckptfused {

// What a block computes, as data. Written by ckptfused/spec.py as one readable string, parsed once
// and cached here; the two files list the same keys.

struct NormSpec {
  std::string kind = "none";  // none | layernorm | rmsnorm | gemma (weight is 1 + w)
  double eps = 1e-5;
  bool on() const { return kind != "none"; }
};

// A low-rank adapter beside a projection: y += scale * b(a(drop(x))).
struct AdapterSpec {
  char target = 0;  // q, k, v, o of attention; g(ate), u(p), d(own) of the FFN
  int64_t rank = 0;
  double scale = 1.0, p = 0.0;
};

// The frame that both halves share: out?( x + m * drop( post?( f( pre?(x) ) ) ) ).
struct HalfSpec {
  NormSpec pre, post, out;
  double m = 1.0;           // residual multiplier
  double p_res = 0.0;       // dropout of the half's output
  bool joint = false;       // one weight for q/k/v, or for gate/up
  bool transposed = false;  // weights stored [in, out]
  std::vector<AdapterSpec> lora;

  bool drops_in_adapter() const {
    for (const AdapterSpec& a : lora) {
      if (a.p > 0) return true;
    }
    return false;
  }
};

// Where the heads of q, k or v lie among the columns of the qkv product: `count` heads of D columns
// each, `stride` columns apart, from column `col0` on.
struct HeadColumns {
  int64_t count, col0, stride;
};

struct AttentionSpec : HalfSpec {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  bool interleaved = false;  // joint: rows in the order [heads, q | k | v, head_dim]
  double scale = 0.0;
  bool causal = false;
  int64_t window = 0;
  double softcap = 0.0;
  std::string rope = "none";  // none | half | interleaved
  int64_t rotary_dim = 0;
  NormSpec qk;
  double p_attn = 0.0;
  std::string mask = "none", padding = "none";  // none | keep | drop | add
  bool packed = false;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  HeadColumns q_columns() const { return {heads, 0, head_stride()}; }
  HeadColumns k_columns() const {
    return {kv_heads, interleaved ? head_dim : q_width(), head_stride()};
  }
  HeadColumns v_columns() const {
    return {kv_heads, interleaved ? 2 * head_dim : q_width() + kv_width(), head_stride()};
  }

 private:
  int64_t head_stride() const { return interleaved ? 3 * head_dim : head_dim; }
};

struct FFNSpec : HalfSpec {
  std::string act = "relu";
  int64_t hidden = 0;
  double p_hidden = 0.0;

  bool gated() const { return act.find("glu") != std::string::npos; }
  int64_t gu_width() const { return gated() ? 2 * hidden : hidden; }
};

// The values that may be kept for backward, in the order in which block_fwd returns them.
struct KeepSpec {
  bool attn = false;  // o and lse
  bool mid = false;   // input of the FFN half, or the sum before the first closing norm
  bool proj = false;  // attention projection before its post-norm
  bool qkv = false;   // raw product
  bool gu = false;    // gate and up pre-activations
  bool out = false;   // sum before the closing norm, or the down product before its post-norm
};

enum class Parallel { no, two_norms, shared_norm };

struct BlockSpec {
  bool has_attn = false, has_ffn = false;
  AttentionSpec attn;
  FFNSpec ffn;
  KeepSpec keep;
  Parallel parallel = Parallel::no;
  bool seq_first = false;
  c10::ScalarType compute = c10::ScalarType::Undefined;  // Undefined: the type of x

  bool has_dropout() const {
    return (has_attn && (attn.p_attn > 0 || attn.p_res > 0 || attn.drops_in_adapter())) ||
           (has_ffn && (ffn.p_hidden > 0 || ffn.p_res > 0 || ffn.drops_in_adapter()));
  }
};

// Slots of the params list. A half that is absent has none. The adapters' (a, b and bias of each)
// follow those of both halves.
enum AttentionParam : int {
  kAttnPreW,
  kAttnPreB,
  kQW,
  kQB,
  kKW,
  kKB,
  kVW,
  kVB,
  kQNormW,
  kQNormB,
  kKNormW,
  kKNormB,
  kOW,
  kOB,
  kAttnPostW,
  kAttnPostB,
  kAttnOutW,
  kAttnOutB,
  kAttentionParams
};
enum FFNParam : int {
  kFFNPreW,
  kFFNPreB,
  kGateW,
  kGateB,
  kUpW,
  kUpB,
  kDownW,
  kDownB,
  kFFNPostW,
  kFFNPostB,
  kFFNOutW,
  kFFNOutB,
  kFFNParams
};
enum AuxSlot : int { kCos, kSin, kMask, kPadding, kCuSeqlens, kAuxSlots };

// Parses a spec, or finds it among those parsed before. Throws c10::Error on an unknown key or
// value.
std::shared_ptr<const BlockSpec> parse_spec(const std::string& text);

}  // namespace ckptfused
