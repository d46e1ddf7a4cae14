// v where it has a norm; q and k where their norm is over all heads together, or comes after RoPE:
// norm and rotation are kernels of their own, and neither writes to the raw product.
#include "ops/torch.h"

#include "block/block.h"

namespace ckptfused {

using at::Tensor;

namespace {

call::QkArgs rotation_only(call::QkArgs args) {
  args.norm = "none";
  return args;
}

call::QkArgs norm_only(call::QkArgs args) {
  args.rope = "none";
  return args;
}

// Of each head of v.
call::QkArgs norm_of_v(const AttentionSpec& a) {
  return {{}, {}, a.v.kind, a.v.eps, "none", 0};
}

}  // namespace

// v after its norm, apart from the raw product, which backward reads.
void Block::norm_v() {
  if (!spec_.attn.v.on() || !value_.v.defined()) return;
  const Tensor normed = key_heads(P_, "v");
  call::qk_fwd({value_.v.transpose(1, 2), normed.transpose(1, 2), {}, {}}, {},
               norm_of_v(spec_.attn));
  value_.v = normed;
}

// The gradient of v before its norm.
Tensor Block::v_backward(const Tensor& dv, const Tensor& raw) {
  if (!spec_.attn.v.on() || !dv.defined()) return dv;
  const Tensor from = heads_view(raw, spec_.attn.v_columns()), made = key_heads(P_, "d v");
  call::qk_bwd({dv.transpose(1, 2), from.transpose(1, 2), made.transpose(1, 2), {}, {}, {}}, {}, {},
               {}, norm_of_v(spec_.attn));
  return made;
}

// q and k, as far as this block makes them.
std::vector<Block::Side> Block::sides() {
  const AttentionSpec& a = spec_.attn;
  std::vector<Side> list;
  if (makes_q())
    list.push_back({a.q_columns(), attn_slot(kQNormW), &value_.q, "q", "d q", "d q rows"});
  if (makes_keys())
    list.push_back({a.k_columns(), attn_slot(kKNormW), &value_.k, "k", "d k", "d k rows"});
  return list;
}

// q and k of a raw product after RoPE alone, at their columns of a buffer as wide.
Tensor Block::turned_heads(const Tensor& raw) {
  const Tensor turned = empty({N_, spec_.attn.qkv_width()}, P_, "turned q and k");
  std::vector<call::QkHeads> heads;
  for (const Side& side : sides()) {
    heads.push_back({heads_view(raw, side.columns).transpose(1, 2),
                     heads_view(turned, side.columns).transpose(1, 2),
                     {},
                     {}});
  }
  heads.resize(2);
  call::qk_fwd(heads[0], heads[1], rotation_only(qk_args()));
  return turned;
}

void Block::make_qk_in_steps() {
  const AttentionSpec& a = spec_.attn;
  std::vector<call::QkHeads> heads;
  if (makes_keys()) value_.v = heads_view(value_.qkv, a.v_columns());
  if (a.qk_place == "turned") {
    const Tensor turned = turned_heads(value_.qkv);
    for (const Side& side : sides()) {
      *side.made = heads_view(turned, side.columns);
      const Tensor of = side.made->transpose(1, 2);
      heads.push_back({of, of, param(side.slot), param(side.slot + 1)});
    }
    heads.resize(2);
    call::qk_fwd(heads[0], heads[1], norm_only(qk_args()));
    return;
  }
  for (const Side& side : sides()) {
    const int64_t count = side.columns.count, width = count * a.head_dim;
    const Tensor rows = value_.qkv.narrow(1, side.columns.col0, width).contiguous();
    const Tensor normed = empty({N_, width}, P_, side.name);
    call::norm_fwd(rows, param(side.slot), param(side.slot + 1), normed, a.qk.kind, a.qk.eps);
    *side.made = heads_view(normed, {count, 0, a.head_dim});
    heads.push_back({side.made->transpose(1, 2), side.made->transpose(1, 2), {}, {}});
  }
  heads.resize(2);
  if (a.rope != "none") call::qk_fwd(heads[0], heads[1], rotation_only(qk_args()));
}

// Undefined gradients are of what this block does not make.
void Block::qk_backward_in_steps(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                 const Tensor& raw, const Tensor& dqkv) {
  const AttentionSpec& a = spec_.attn;
  const auto place = [&](const HeadColumns& columns) {
    return heads_view(dqkv, columns).transpose(1, 2);
  };
  const auto given = [&](const Side& side) {
    return (side.made == &value_.q ? dq : dk).transpose(1, 2);
  };
  const Tensor v = dv.defined() ? dv.transpose(1, 2) : dv;
  const Tensor v_place = dv.defined() ? place(a.v_columns()) : dv;
  std::vector<call::QkGradHeads> steps;
  if (a.qk_place == "turned") {
    const Tensor turned = turned_heads(raw);
    std::vector<call::QkGradHeads> turns;
    for (const Side& side : sides()) {
      const int64_t rows[] = {N_, a.head_dim, side.columns.count};
      const Tensor at = place(side.columns);
      steps.push_back({given(side), heads_view(turned, side.columns).transpose(1, 2), at,
                       param(side.slot), grad_partials(side.slot, rows),
                       grad_partials(side.slot + 1, rows)});
      turns.push_back({at, {}, at, {}, {}, {}});
    }
    steps.resize(2);
    turns.resize(2);
    call::qk_bwd(steps[0], steps[1], {}, {}, norm_only(qk_args()));
    call::qk_bwd(turns[0], turns[1], v, v_place, rotation_only(qk_args()));
    return;
  }
  std::vector<Tensor> normed;  // gradients of what the norm made
  for (const Side& side : sides()) {
    const int64_t count = side.columns.count;
    normed.push_back(empty({N_, count * a.head_dim}, P_, side.gradient));
    const Tensor to = heads_view(normed.back(), {count, 0, a.head_dim}).transpose(1, 2);
    steps.push_back({given(side), {}, to, {}, {}, {}});
  }
  steps.resize(2);
  call::qk_bwd(steps[0], steps[1], v, v_place, rotation_only(qk_args()));
  for (size_t i = 0; i < normed.size(); ++i) {
    const Side side = sides()[i];
    const int64_t width = side.columns.count * a.head_dim;
    const Tensor rows = raw.narrow(1, side.columns.col0, width).contiguous();
    const Tensor drows = empty({N_, width}, P_, side.gradient_rows);
    call::norm_bwd(normed[i], rows, param(side.slot), {}, drows,
                   grad_partials(side.slot, {N_, width, 0}),
                   grad_partials(side.slot + 1, {N_, width, 0}), a.qk.kind, a.qk.eps);
    dqkv.narrow(1, side.columns.col0, width).copy_(drows);
  }
}

}  // namespace ckptfused
