// q and k where their norm is over all heads together, or comes after RoPE: norm and rotation are
// kernels of their own, and neither writes to the raw product.
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

// Columns of q or k among those of the raw product, and the slot of their norm.
struct Side {
  HeadColumns columns;
  int slot;
};

}  // namespace

// q and k of a raw product after RoPE alone, at their columns of a buffer as wide.
Tensor Block::turned_heads(const Tensor& raw) const {
  const AttentionSpec& a = spec_.attn;
  const Tensor turned = empty({N_, a.qkv_width()}, P_, "turned q and k");
  const auto heads = [&](const HeadColumns& columns) -> call::QkHeads {
    return {heads_view(raw, columns).transpose(1, 2),
            heads_view(turned, columns).transpose(1, 2),
            {},
            {}};
  };
  call::qk_fwd(heads(a.q_columns()), heads(a.k_columns()), rotation_only(qk_args()));
  return turned;
}

void Block::make_qk_in_steps() {
  const AttentionSpec& a = spec_.attn;
  const Side sides[] = {{a.q_columns(), attn_slot(kQNormW)}, {a.k_columns(), attn_slot(kKNormW)}};
  Tensor* const made[] = {&value_.q, &value_.k};
  value_.v = heads_view(value_.qkv, a.v_columns());
  if (a.qk_place == "turned") {
    const Tensor turned = turned_heads(value_.qkv);
    const auto heads = [&](const Side& side) -> call::QkHeads {
      const Tensor of = heads_view(turned, side.columns).transpose(1, 2);
      return {of, of, param(side.slot), param(side.slot + 1)};
    };
    call::qk_fwd(heads(sides[0]), heads(sides[1]), norm_only(qk_args()));
    for (int i = 0; i < 2; ++i) *made[i] = heads_view(turned, sides[i].columns);
    return;
  }
  call::QkHeads rotated[2];
  for (int i = 0; i < 2; ++i) {
    const auto& [columns, slot] = sides[i];
    const int64_t width = columns.count * a.head_dim;
    const Tensor rows = value_.qkv.narrow(1, columns.col0, width).contiguous();
    const Tensor normed = empty({N_, width}, P_, i == 0 ? "q" : "k");
    call::norm_fwd(rows, param(slot), param(slot + 1), normed, a.qk.kind, a.qk.eps);
    *made[i] = heads_view(normed, {columns.count, 0, a.head_dim});
    rotated[i] = {made[i]->transpose(1, 2), made[i]->transpose(1, 2), {}, {}};
  }
  if (a.rope != "none") call::qk_fwd(rotated[0], rotated[1], rotation_only(qk_args()));
}

void Block::qk_backward_in_steps(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                 const Tensor& raw, const Tensor& dqkv) {
  const AttentionSpec& a = spec_.attn;
  const auto place = [&](const HeadColumns& columns) {
    return heads_view(dqkv, columns).transpose(1, 2);
  };
  const Side sides[] = {{a.q_columns(), attn_slot(kQNormW)}, {a.k_columns(), attn_slot(kKNormW)}};
  const Tensor given[] = {dq.transpose(1, 2), dk.transpose(1, 2)};
  call::QkGradHeads steps[2];
  if (a.qk_place == "turned") {
    const Tensor turned = turned_heads(raw);
    for (int i = 0; i < 2; ++i) {
      const auto& [columns, slot] = sides[i];
      const int64_t rows[] = {N_, a.head_dim, columns.count};
      steps[i] = {given[i],
                  heads_view(turned, columns).transpose(1, 2),
                  place(columns),
                  param(slot),
                  grad_partials(slot, rows),
                  grad_partials(slot + 1, rows)};
    }
    call::qk_bwd(steps[0], steps[1], {}, {}, norm_only(qk_args()));
    for (int i = 0; i < 2; ++i) {
      const Tensor at = place(sides[i].columns);
      steps[i] = {at, {}, at, {}, {}, {}};
    }
    call::qk_bwd(steps[0], steps[1], dv.transpose(1, 2), place(a.v_columns()),
                 rotation_only(qk_args()));
    return;
  }
  Tensor normed[2];  // gradients of what the norm made
  for (int i = 0; i < 2; ++i) {
    const int64_t count = sides[i].columns.count;
    normed[i] = empty({N_, count * a.head_dim}, P_, i == 0 ? "d q" : "d k");
    steps[i] = {given[i], {}, heads_view(normed[i], {count, 0, a.head_dim}).transpose(1, 2),
                {},       {}, {}};
  }
  call::qk_bwd(steps[0], steps[1], dv.transpose(1, 2), place(a.v_columns()),
               rotation_only(qk_args()));
  for (int i = 0; i < 2; ++i) {
    const auto& [columns, slot] = sides[i];
    const int64_t width = columns.count * a.head_dim;
    const Tensor rows = raw.narrow(1, columns.col0, width).contiguous();
    const Tensor drows = empty({N_, width}, P_, i == 0 ? "d q rows" : "d k rows");
    call::norm_bwd(normed[i], rows, param(slot), {}, drows, grad_partials(slot, {N_, width, 0}),
                   grad_partials(slot + 1, {N_, width, 0}), a.qk.kind, a.qk.eps);
    dqkv.narrow(1, columns.col0, width).copy_(drows);
  }
}

}  // namespace ckptfused
