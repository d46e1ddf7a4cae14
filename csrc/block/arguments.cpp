// The arguments of a block call: checked, and as kernels and products read them.
#include "ops/torch.h"

#include "block/block.h"
#include "math/dropout.h"
#include "ops/attention_gpu.h"
#include "ops/checks.h"

namespace ckptfused {

using at::Tensor;

namespace {

Tensor aux_at(const OptTensorList& aux, int slot) {
  const std::optional<Tensor> t = aux.get(slot);
  return t.has_value() ? *t : Tensor();
}

// cos or sin as the kernels read it: [B or 1, T, r/2], contiguous, in the accumulation type.
Tensor normalise_angles(const Tensor& t, const AttentionSpec& a, int64_t T, at::ScalarType type) {
  if (!t.defined()) return t;
  const int64_t half = a.rotary_dim / 2;
  TORCH_CHECK((t.dim() == 2 || t.dim() == 3) && t.size(-2) == T &&
                  (t.size(-1) == half || t.size(-1) == 2 * half),
              "ckptfused: cos and sin must be [T, r] or [B, T, r] with T = ", T, " and r = ", half,
              " or ", 2 * half, ", got ", t.sizes());
  const Ledger::Name name("cos and sin");
  Tensor out = t.dim() == 2 ? t.unsqueeze(0) : t;
  if (out.size(-1) != half) {
    out = a.rope == "half" ? out.narrow(-1, 0, half) : out.slice(-1, 0, 2 * half, 2);
  }
  return out.to(type).contiguous();
}

// Factors of q as [B or 1, T].
Tensor normalise_factors(const Tensor& t, int64_t B, int64_t T, at::ScalarType type) {
  if (!t.defined()) return t;
  const bool fits =
      (t.dim() == 1 || (t.dim() == 2 && (t.size(0) == 1 || t.size(0) == B))) && t.size(-1) == T;
  TORCH_CHECK(fits, "ckptfused: q_scale must be [T] or [B, T] with B = ", B, " and T = ", T,
              ", got ", t.sizes());
  const Ledger::Name name("q by position");
  return t.view({t.dim() == 1 ? 1 : t.size(0), T}).to(type);
}

// A parameter as kernels and products read it. A product would copy a matrix without unit stride at
// each use, and in what order is its own affair: with weights that a saved-tensor hook gives back
// with other strides, backward would replay other bits.
Tensor as_operand(const Tensor& p) {
  const bool matrix = p.dim() == 2 && (p.stride(0) == 1 || p.stride(1) == 1);
  return matrix ? p : p.contiguous();
}

}  // namespace

void Block::set_ffn_tiles() {
  if (!spec_.has_ffn) return;
  const FFNSpec& f = spec_.ffn;
  const bool cuda = !on_cpu(x_);
  tiles_ = counts_whole_ffn() ? FFNTiles{N_, f.hidden}
                              : ffn_tiles(N_, C_, f.hidden, f.gated(), c10::elementSize(P_),
                                          scratch_limit(spec_.scratch, cuda), cuda);
  choose_up_kernel();
}

// On the CPU always; on a GPU where the caller limits the scratch, for cuDNN's kernel for whole
// calls is the faster one, and nothing is dropped of the residual stream, whose kernel counts rows
// from 0 there.
bool Block::may_go_by_queries() const {
  if (on_cpu(x_)) return true;
  if (spec_.scratch == 0 || spec_.attn.p_res > 0 || (spec_.has_ffn && spec_.ffn.p_res > 0)) {
    return false;
  }
  const AttentionSpec& a = spec_.attn;
  const unsigned special =
      (a.mask != "none") * kHasMasks | (a.padding != "none") * kHasPadding | a.packed * kHasPacked |
      (a.window != 0 && a.window < T_) * kHasWindow | (a.softcap != 0.0) * kHasSoftcap |
      (dropout_threshold(a.p_attn) != 0) * kHasDropout | !(a.scale >= kLeastScale) * kHasScale;
  return has_tiles_on_gpu({special, P_, B_, a.heads, T_, T_, a.head_dim}, x_);
}

void Block::set_query_tiles() {
  const int64_t batches = spec_.seq_first ? B_ : 1;
  tile_rows_ = batches * T_;
  if (!spec_.has_attn || counts_whole_ffn() || !may_go_by_queries()) return;
  const AttentionSpec& a = spec_.attn;
  const FFNSpec& f = spec_.ffn;
  const int64_t ffn_width = spec_.has_ffn ? f.gu_width() + f.hidden : 0;
  const QueryWork work{batches,
                       a.q_width(),
                       a.kv_width(),
                       C_ * (a.qkv_width() + a.q_width() + ffn_width),
                       int64_t(c10::elementSize(P_)),
                       int64_t(c10::elementSize(A_))};
  tile_rows_ = batches * query_tile(T_, work, spec_.scratch);
}

Block::Block(const BlockSpec& spec, const Tensor& x, const OptTensorList& params,
             const OptTensorList& aux, const std::optional<Tensor>& rng_state)
    : spec_(spec), x_sizes_(x.sizes().vec()) {
  TORCH_CHECK(x.dim() == 3, "ckptfused: x must be [B, T, C] or, sequence first, [T, B, C]; got ",
              x.sizes());
  check_memory("ckptfused", "x", x);
  R_ = x.scalar_type();
  TORCH_CHECK(R_ == at::kDouble || R_ == at::kFloat || R_ == at::kBFloat16 || R_ == at::kHalf,
              "ckptfused: x must be float64, float32, bfloat16 or float16, got ", R_);
  P_ = spec.compute == at::ScalarType::Undefined ? R_ : spec.compute;
  TORCH_CHECK(P_ == R_ || (R_ == at::kFloat && (P_ == at::kBFloat16 || P_ == at::kHalf)),
              "ckptfused: a residual stream of ", R_, " cannot be computed in ", P_);
  A_ = R_ == at::kDouble ? at::kDouble : at::kFloat;
  B_ = x.size(spec.seq_first ? 1 : 0);
  T_ = x.size(spec.seq_first ? 0 : 1);
  C_ = x.size(2);
  N_ = B_ * T_;
  if (spec.seq_first) row_map_ = {B_, T_};
  x_ = x.contiguous().view({N_, C_});

  const size_t expected = (spec.has_attn ? size_t(kAttentionParams) : 0) +
                          (spec.has_ffn ? size_t(kFFNParams) : 0) + adapter_params() +
                          quantized_params();
  TORCH_CHECK(params.size() == expected, "ckptfused: the spec has ", expected,
              " parameter slots, got ", params.size());
  TORCH_CHECK(aux.size() == size_t(kAuxSlots), "ckptfused: expected ", int(kAuxSlots),
              " auxiliary tensors, got ", aux.size());
  for (int slot = 0; slot < kAuxSlots; ++slot) {
    check_memory("ckptfused", kAuxNames[slot], aux.get(slot));
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const std::optional<Tensor> p = params.get(i);
    check_memory("ckptfused", "params[" + std::to_string(i) + "]", p);
    // Kernels read vectors in place; matrix products read any strides.
    params_.push_back(p.has_value() ? as_operand(*p) : Tensor());
  }
  cast_.resize(params_.size());
  find_quantized();
  find_adapters();
  check_adapters();
  grads_.resize(params_.size());
  if (spec.has_attn) {
    cos_ = normalise_angles(aux_at(aux, kCos), spec.attn, T_, A_);
    sin_ = normalise_angles(aux_at(aux, kSin), spec.attn, T_, A_);
    TORCH_CHECK(spec.attn.rope == "none" || (cos_.defined() && sin_.defined()),
                "ckptfused: rope=", spec.attn.rope, " needs cos and sin");
    q_scale_ = normalise_factors(aux_at(aux, kQScale), B_, T_, P_);
    TORCH_CHECK(spec.attn.q_scale == q_scale_.defined(), "ckptfused: q_scale=", spec.attn.q_scale,
                q_scale_.defined() ? " takes no factors of q" : " needs factors of q");
    mask_ = aux_at(aux, kMask);
    padding_ = aux_at(aux, kPadding);
    cu_seqlens_ = aux_at(aux, kCuSeqlens);
  }
  set_ffn_tiles();
  set_query_tiles();
  if (spec.has_dropout()) {
    TORCH_CHECK(rng_state.has_value(), "ckptfused: dropout needs an rng_state");
    check_memory("ckptfused", "rng_state", *rng_state);
    rng_ = rng_state->contiguous();
  }
}

}  // namespace ckptfused
