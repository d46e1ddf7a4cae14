// The attention half: n1 -> qkv -> q, k, v -> o, lse -> proj, and back.
#include "ops/torch.h"

#include "block/block.h"
#include "math/dropout.h"
#include "ops/sinks.h"

namespace ckptfused {

using at::Tensor;

std::vector<Part> Block::qkv_parts() const {
  const AttentionSpec& a = spec_.attn;
  const int64_t q = a.q_product_width(), kv = a.kv_width();
  std::vector<Part> parts;
  // The rows of a head's q, k and v that lie together are made together.
  if (a.joint && (a.interleaved || projected_ == Projected::all)) {
    parts.push_back({kQW, kQB, 0, a.joint_width(), 0});
  } else {
    if (makes_q()) parts.push_back({kQW, kQB, 0, q, 0});
    if (makes_keys() && a.joint) parts.push_back({kQW, kQB, q, 2 * kv, q});
    if (makes_keys() && !a.joint) {
      parts.push_back({kKW, kKB, 0, kv, q});
      parts.push_back({kVW, kVB, 0, kv, q + kv});
    }
  }
  if (makes_q() && a.gated() && !a.gate_in_q) {
    parts.push_back({kAttnGateW, kAttnGateB, 0, a.gate_width(), a.joint_width()});
  }
  return parts;
}

// Those columns of a [N, W] buffer as [B, heads, T, D], whatever the row order.
Tensor Block::heads_view(const Tensor& buffer, const HeadColumns& columns) const {
  const int64_t D = spec_.attn.head_dim, width = buffer.stride(0);
  const int64_t stride_b = spec_.seq_first ? width : T_ * width;
  const int64_t stride_t = spec_.seq_first ? B_ * width : width;
  return buffer.as_strided({B_, columns.count, T_, D}, {stride_b, columns.stride, stride_t, 1},
                           buffer.storage_offset() + columns.col0);
}

call::AttentionArgs Block::attention_args() const {
  const AttentionSpec& a = spec_.attn;
  return {mask_,   padding_, cu_seqlens_, rng_,      a.mask,  a.padding,
          a.scale, a.causal, a.window,    a.softcap, a.p_attn};
}

call::QkArgs Block::qk_args() const {
  const AttentionSpec& a = spec_.attn;
  return {cos_, sin_, a.qk.kind, a.qk.eps, a.rope, a.rotary_dim};
}

void Block::ensure_n1() {
  if (value_.n1.defined()) return;
  value_.n1 = pre_norm(x_, spec_.attn.pre, attn_slot(kAttnPreW), attn_slot(kAttnPreB), P_, "n1");
}

// Backward reads it once more, for the gradients of q, k and v's weights.
void Block::release_n1() {
  const bool read_again = backward_ && need_any(attn_slot(kQW), attn_slot(kAttnGateB) + 1);
  if (spec_.parallel != Parallel::shared_norm && !read_again) value_.n1.reset();
}

void Block::ensure_qkv() {
  if (value_.qkv.defined() && !qk_in_place_) return;
  ensure_n1();
  value_.qkv = empty({N_, spec_.attn.qkv_width()}, P_, "qkv");
  qk_in_place_ = false;
  project("qkv", value_.qkv, value_.n1, qkv_parts(), spec_.attn.transposed);
  release_n1();
}

void Block::release_heads() {
  value_.q.reset();
  value_.k.reset();
  value_.v.reset();
}

void Block::release_qkv() {
  release_heads();
  if (!(save_ && spec_.keep.qkv)) value_.qkv.reset();
}

// Whether backward makes q, k and v once more after the FFN, beside whose piece they would take
// more than the caller allows.
bool Block::makes_qkv_again() const {
  if (!spec_.has_attn || spec_.scratch == 0 || spec_.keep.qkv || spec_.keep.gu) return false;
  const int64_t size = int64_t(c10::elementSize(P_));
  const int64_t whole = ffn_scratch(N_, spec_.ffn.hidden, spec_.ffn.gated(), size);
  const int64_t piece = std::min(whole, spec_.scratch);
  return N_ * spec_.attn.qkv_width() * size + piece > spec_.scratch;
}

void Block::ensure_qk() {
  if (value_.q.defined() || value_.k.defined()) return;
  ensure_qkv();
  const bool own = make_qk();
  norm_v();
  scale_by_position(value_.q, own);
}

// own: it may be written to.
void Block::scale_by_position(Tensor& q, bool own) const {
  if (!q.defined() || !q_scale_.defined()) return;
  const Ledger::Name name("q by position");
  const Tensor factors = q_scale_.unsqueeze(1).unsqueeze(3);
  if (own) {
    q.mul_(factors);
  } else {
    q = q * factors;
  }
}

// q, k and v before q is scaled. Returns whether q may be written to: not where it is a view of a
// product that is kept.
bool Block::make_qk() {
  const AttentionSpec& a = spec_.attn;
  if (a.qk_in_steps()) {
    make_qk_in_steps();
    return true;
  }
  const bool plain = !a.qk.on() && a.rope == "none";
  // The raw product has to survive where it is saved, or where the norm's backward will read it. q
  // and k then go to a buffer of the same strides, whose columns for v nobody touches: a matrix
  // library may choose its kernel, and with it the bits, by the strides of its operands.
  const bool raw_needed = spec_.keep.qkv || (backward_ && a.qk.on());
  const Tensor target =
      plain || !raw_needed ? value_.qkv : empty({N_, a.qkv_width()}, P_, "q and k");
  if (makes_q()) value_.q = heads_view(target, a.q_columns());
  if (makes_keys()) {
    value_.k = heads_view(target, a.k_columns());
    value_.v = heads_view(value_.qkv, a.v_columns());
  }
  if (plain) return false;
  qk_in_place_ = target.is_same(value_.qkv);
  const auto heads = [&](const HeadColumns& columns, int slot) -> call::QkHeads {
    return {heads_view(value_.qkv, columns).transpose(1, 2),
            heads_view(target, columns).transpose(1, 2), param(slot), param(slot + 1)};
  };
  std::vector<call::QkHeads> parts;
  if (projected_ == Projected::all && !a.qk.on() && !a.interleaved && !a.gate_in_q) {
    // Without weights of their own they are turned alike.
    const HeadColumns both{a.heads + a.kv_heads, 0, a.q_columns().stride};
    parts.push_back(heads(both, attn_slot(kQNormW)));
  } else {
    for (const Side& side : sides()) parts.push_back(heads(side.columns, side.slot));
  }
  parts.resize(2);
  call::qk_fwd(parts[0], parts[1], qk_args());
  return true;
}

void Block::ensure_attn() {
  if (value_.o.defined()) return;
  ensure_qk();
  const Ledger::Name name("o and lse");
  auto [o, lse] = makes_keys() ? call::attention_fwd(value_.q, value_.k, value_.v, attention_args())
                               : call::attention_tile_fwd(value_.q, keys_.k, keys_.v,
                                                          attention_args(), query_tile_);
  value_.lse = lse.contiguous();
  if (spec_.attn.sinks) value_.lse = add_sinks(o.transpose(1, 2), value_.lse, param(kSinks));
  value_.o = o.transpose(1, 2).view({B_, T_, spec_.attn.q_width()});
  if (backward_) return;
  spec_.attn.gated() ? release_heads() : release_qkv();
}

// o as the rows that the projection multiplies, or that its gate does. Attention writes
// batch-first; only a sequence-first block pays a copy here.
Tensor Block::o_rows() const {
  const Ledger::Name name("rows of o");
  const Tensor rows = spec_.seq_first ? value_.o.transpose(0, 1).contiguous() : value_.o;
  return rows.view({N_, spec_.attn.q_width()});
}

void Block::ensure_proj() {
  if (value_.proj.defined()) return;
  ensure_attn();
  value_.proj = like_x(P_, "proj");
  const Tensor rows = spec_.attn.gated() ? gated_rows() : o_rows();
  project("proj", value_.proj, rows, {{kOW, kOB, 0, C_, 0}}, spec_.attn.transposed);
}

Tensor Block::attention_backward(const Tensor& ds) {
  const AttentionSpec& a = spec_.attn;
  const bool need_n1 = needs_[0] || need(attn_slot(kAttnPreW)) || need(attn_slot(kAttnPreB));
  const bool need_qkv = need_n1 || need_any(attn_slot(kQW), attn_slot(kKNormB) + 1);
  const bool need_o = need_qkv || need(attn_slot(kSinks));
  const bool need_proj = need_o || need_any(attn_slot(kOW), attn_slot(kAttnPostB) + 1);
  if (!need_proj) return {};

  if (a.post.on()) ensure_proj();
  Tensor dproj = residual_backward(ds, value_.proj, a, attn_slot(kAttnPostW),
                                   int(DropoutSite::attention_residual));
  value_.proj.reset();
  const std::vector<Part> o_part = {{kOW, kOB, 0, C_, 0}};
  Tensor d_o = need_o ? empty({N_, a.q_width()}, P_, "d o") : Tensor();
  const bool reads_o = need_o || need_any(attn_slot(kOW), attn_slot(kOW) + 1);
  if (reads_o) ensure_attn();
  Tensor rows = !reads_o ? Tensor() : a.gated() ? gated_rows() : o_rows();
  project_backward(dproj, rows, o_part, a.transposed, d_o, false, false);
  dproj.reset();
  const Tensor d_gate = a.gated() && need_o ? gate_backward(d_o, rows) : Tensor();
  rows.reset();
  if (need(attn_slot(kSinks))) {
    sinks_grad_out(grad_vector(kSinks), heads_view(d_o, o_columns()).transpose(1, 2),
                   value_.o.view({B_, T_, a.heads, a.head_dim}), value_.lse, param(kSinks), sums_);
  }
  if (!need_qkv) return {};

  ensure_qk();
  Tensor dq, dk, dv;
  {
    const Ledger::Name name("d q, d k and d v");
    const Tensor dout = heads_view(d_o, o_columns());
    const Tensor o = value_.o.view({B_, T_, a.heads, a.head_dim}).transpose(1, 2);
    if (makes_keys()) {
      std::tie(dq, dk, dv) =
          call::attention_bwd(dout, value_.q, value_.k, value_.v, o, value_.lse, attention_args());
    } else {
      dq = call::attention_tile_bwd(dout, value_.q, keys_.k, keys_.v, o, value_.lse, keys_.dk,
                                    keys_.dv, attention_args(), query_tile_);
    }
  }
  scale_by_position(dq, true);
  d_o.reset();
  value_.o.reset();
  value_.lse.reset();
  Tensor raw = a.qk.on() || a.v.on() ? value_.qkv : Tensor();
  value_.q.reset();
  value_.k.reset();
  value_.v.reset();
  value_.qkv.reset();
  return qkv_backward(std::move(dq), std::move(dk), std::move(dv), std::move(raw), d_gate);
}

Tensor Block::qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor raw, const Tensor& d_gate) {
  const AttentionSpec& a = spec_.attn;
  const bool need_n1 = needs_[0] || need(attn_slot(kAttnPreW)) || need(attn_slot(kAttnPreB));
  Tensor dqkv = empty({N_, a.qkv_width()}, P_, "d qkv");
  // A library's product of some columns may read those beside them, and of joint ones takes all.
  if (projected_ != Projected::all) dqkv.zero_();
  const auto place = [&](const HeadColumns& columns) {
    return heads_view(dqkv, columns).transpose(1, 2);
  };
  dv = v_backward(dv, raw);
  if (!a.qk.on()) raw.reset();
  if (a.qk_in_steps()) {
    qk_backward_in_steps(dq, dk, dv, raw, dqkv);
  } else if (a.qk.on() || a.rope != "none") {
    std::vector<call::QkGradHeads> parts;
    for (const Side& side : sides()) {
      const Tensor from = raw.defined() ? heads_view(raw, side.columns).transpose(1, 2) : Tensor();
      const int64_t rows[] = {N_, a.head_dim, side.columns.count};
      parts.push_back({(side.made == &value_.q ? dq : dk).transpose(1, 2), from,
                       place(side.columns), param(side.slot), grad_partials(side.slot, rows),
                       grad_partials(side.slot + 1, rows)});
    }
    parts.resize(2);
    const bool keys = dv.defined();
    call::qk_bwd(parts[0], parts[1], keys ? dv.transpose(1, 2) : dv,
                 keys ? place(a.v_columns()) : dv, qk_args());
  } else if (projected_ == Projected::all && !a.interleaved && !a.gated() && !spec_.seq_first) {
    Tensor heads = dqkv.view({B_, T_, a.heads + 2 * a.kv_heads, a.head_dim});
    const Ledger::Name name("d qkv");
    at::cat_out(heads, {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)}, 2);
  } else {
    if (dq.defined()) place(a.q_columns()).copy_(dq.transpose(1, 2));
    if (dk.defined()) {
      place(a.k_columns()).copy_(dk.transpose(1, 2));
      place(a.v_columns()).copy_(dv.transpose(1, 2));
    }
  }
  if (d_gate.defined()) gate_grad_out(dqkv, d_gate);
  raw.reset();
  dq.reset();
  dk.reset();
  dv.reset();

  Tensor dn1 = need_n1 ? like_x(P_, "d n1") : Tensor();
  if (need_any(attn_slot(kQW), attn_slot(kAttnGateB) + 1)) ensure_n1();
  project_backward(dqkv, value_.n1, qkv_parts(), a.transposed, dn1, false, false);
  value_.n1.reset();
  return dn1;
}

}  // namespace ckptfused
