// The residual stream: how the two halves meet, what is kept, and the order of backward.
#include "ops/torch.h"

#include <utility>

#include "block/block.h"
#include "math/dropout.h"
#include "ops/checks.h"

namespace ckptfused {

using at::Tensor;

bool residual_makes_next_norm(const BlockSpec& spec) {
  const bool follows = spec.has_attn && spec.has_ffn && spec.parallel == Parallel::no;
  return follows && !spec.attn.out.on() && spec.ffn.pre.on();
}

// mid = x + m * drop(post(proj)); the norm that comes next is made in the same pass.
void Block::ensure_mid() {
  if (value_.mid.defined()) return;
  ensure_proj();
  const AttentionSpec& a = spec_.attn;
  if (ends_in_product(a)) {
    value_.mid = std::exchange(value_.proj, Tensor()).to(R_);
    return release_o();
  }
  const bool ffn_follows = spec_.has_ffn && spec_.parallel == Parallel::no;
  const bool closing = a.out.on();
  const NormSpec& next = closing ? a.out : spec_.ffn.pre;
  const int next_weight = closing ? attn_slot(kAttnOutW) : ffn_slot(kFFNPreW);
  // Backward of the attention half alone reads no closing norm's result.
  const bool fuse_next = closing ? !backward_ || ffn_follows : residual_makes_next_norm(spec_);
  // Forward needs the sum itself unless a closing norm takes its place on the stream.
  const bool need_sum = backward_ || !closing || spec_.keep.mid;
  const Tensor sum = need_sum ? like_x(R_, "mid") : Tensor();
  const Tensor normed = fuse_next ? like_x(closing ? R_ : P_, closing ? "ffn_in" : "n2") : Tensor();
  close(x_, value_.proj, a, attn_slot(kAttnPostW), int(DropoutSite::attention_residual), next,
        next_weight, sum, normed);
  value_.mid = sum;
  (closing ? value_.ffn_in : value_.n2) = normed;
  const bool proj_needed = (backward_ && a.post.on()) || (save_ && spec_.keep.proj);
  if (!proj_needed) value_.proj.reset();
  release_o();
}

// Backward reads them, or whoever it is kept for.
void Block::release_o() {
  if (backward_ || (save_ && spec_.keep.attn)) return;
  value_.o.reset();
  value_.lse.reset();
}

void Block::ensure_ffn_in() {
  if (value_.ffn_in.defined()) return;
  if (!spec_.has_attn || spec_.parallel != Parallel::no) {
    value_.ffn_in = x_;
    return;
  }
  ensure_mid();
  if (value_.ffn_in.defined()) return;
  value_.ffn_in = pre_norm(value_.mid, spec_.attn.out, attn_slot(kAttnOutW), attn_slot(kAttnOutB),
                           R_, "ffn_in");
}

void Block::ensure_n2() {
  if (value_.n2.defined()) return;
  if (spec_.parallel == Parallel::shared_norm) {
    ensure_n1();
    value_.n2 = value_.n1;
    return;
  }
  ensure_ffn_in();
  if (value_.n2.defined()) return;
  value_.n2 =
      pre_norm(value_.ffn_in, spec_.ffn.pre, ffn_slot(kFFNPreW), ffn_slot(kFFNPreB), P_, "n2");
}

// The sum before the closing norm of the FFN half.
void Block::ensure_out() {
  if (value_.out.defined()) return;
  ensure_ffn_in();
  ensure_down();
  value_.out = like_x(R_, "out");
  close(value_.ffn_in, value_.down, spec_.ffn, ffn_slot(kFFNPostW), int(DropoutSite::ffn_residual),
        spec_.ffn.out, 0, value_.out, Tensor());
  if (!spec_.ffn.post.on()) value_.down.reset();
}

std::vector<Tensor> Block::forward(bool save) {
  save_ = save;
  return with_kept(by_tiles() ? forward_in_tiles() : forward_rows());
}

Tensor Block::forward_rows() {
  const FFNSpec& f = spec_.ffn;
  if (spec_.has_attn) ensure_mid();
  if (!spec_.has_ffn) {
    value_.n1.reset();
    return spec_.attn.out.on() ? value_.ffn_in : value_.mid;
  }
  if (save_ && spec_.keep.gu) value_.gu = empty({N_, f.gu_width()}, P_, "gu");
  ensure_ffn_in();
  const Tensor base = spec_.parallel == Parallel::no ? value_.ffn_in : value_.mid;
  if (down_adds()) {
    ensure_n2();
    Tensor y = base;
    if (save_ && spec_.keep.mid && base.is_same(value_.mid)) y = like_x(R_, "y").copy_(base);
    ensure_down(y);
    return y;
  }
  ensure_down();
  value_.n1.reset();
  value_.n2.reset();
  if (ends_in_product(f)) return std::exchange(value_.down, Tensor()).to(R_);
  const Tensor y = like_x(R_, "y");
  const bool keep_sum = save_ && spec_.keep.out && f.out.on();
  if (keep_sum) value_.out = like_x(R_, "out");
  close(base, value_.down, f, ffn_slot(kFFNPostW), int(DropoutSite::ffn_residual), f.out,
        ffn_slot(kFFNOutW), f.out.on() ? value_.out : y, f.out.on() ? y : Tensor());
  return y;
}

// The gradients of vectors, summed wide, in their parameters' type: on a GPU by one kernel.
void Block::narrow_vectors() {
  std::vector<Tensor> wide, narrow;
  for (size_t slot = 0; slot < params_.size(); ++slot) {
    Tensor& grad = grads_[slot];
    if (!grad.defined() || grad.dim() != 1) continue;
    if (grad.scalar_type() == params_[slot].scalar_type()) continue;
    wide.push_back(grad);
    grad = empty(grad.sizes(), params_[slot].scalar_type(), "d", int64_t(slot));
    narrow.push_back(grad);
  }
  if (!wide.empty()) at::_foreach_copy_(narrow, wide);
}

std::vector<Tensor> Block::backward(const Tensor& dy, at::TensorList kept,
                                    const std::vector<bool>& needs) {
  TORCH_CHECK(dy.sizes() == at::IntArrayRef(x_sizes_) && dy.scalar_type() == R_,
              "ckptfused: the gradient must be ", R_, " of shape ", at::IntArrayRef(x_sizes_),
              ", got ", dy.scalar_type(), " of shape ", dy.sizes());
  TORCH_CHECK(needs.size() == params_.size() + 1, "ckptfused: expected ", params_.size() + 1,
              " entries in needs, got ", needs.size());
  check_memory("ckptfused", "dy", dy);
  backward_ = true;
  needs_ = needs;
  restore(kept);

  const Tensor dy_rows = dy.contiguous().view({N_, C_});
  Tensor dx = by_tiles() ? backward_in_tiles(dy_rows) : backward_rows(dy_rows);

  // From here on gradients are only converted: one at a time, beside nothing else.
  value_ = {};
  cast_.clear();
  std::vector<Tensor> result;
  if (needs_[0]) {
    // An op must not return its input.
    const Ledger::Name name("d x");
    if (dx.is_alias_of(dy)) dx = dx.clone();
    result.push_back(dx.view(x_sizes_));
  }
  sum_partials();
  narrow_vectors();
  for (size_t slot = 0; slot < params_.size(); ++slot) {
    if (!needs_[1 + slot]) continue;
    const Tensor grad = std::exchange(grads_[slot], Tensor());
    const Ledger::Name name("d", int64_t(slot));
    result.push_back(grad.defined() ? grad.to(params_[slot].scalar_type())
                                    : at::empty_like(params_[slot]).zero_());
  }
  return result;
}

Tensor Block::backward_rows(const Tensor& dy) {
  Tensor ds = dy;      // gradient of the residual stream, walking down
  bool owned = false;  // whether ds is our scratch
  Tensor dx, dn_shared;
  const bool serial = spec_.parallel == Parallel::no;
  const bool attn_any = spec_.has_attn && need_any(0, kAttentionParams);

  if (spec_.has_ffn) {
    const FFNSpec& f = spec_.ffn;
    const int pre =
        spec_.parallel == Parallel::shared_norm ? attn_slot(kAttnPreW) : ffn_slot(kFFNPreW);
    const bool flows = needs_[0] || (serial && attn_any);
    const bool need_n2 = flows || need_any(pre, pre + 2);
    if (f.out.on()) {
      ensure_out();
      const bool need_sum =
          flows || need_any(ffn_slot(0), ffn_slot(kFFNOutW)) || need(ffn_slot(kCoefficients));
      ds = norm_backward(ds, value_.out, f.out, ffn_slot(kFFNOutW), Tensor(), false, need_sum,
                         "d out");
      owned = true;
      value_.out.reset();
    }
    if (serial && makes_qkv_again()) {
      ensure_n2();
      release_qkv();
    }
    Tensor dn2 = ds.defined() ? ffn_backward(ds, need_n2) : Tensor();
    value_.gu.reset();
    replayed_gu_ = {};
    if (spec_.parallel == Parallel::shared_norm) {
      dn_shared = dn2;
    } else if (dn2.defined()) {
      ensure_ffn_in();
      value_.n2.reset();
      // In a parallel block both branches start from the same gradient: it must survive.
      const Tensor below = norm_backward(dn2, value_.ffn_in, f.pre, pre, f.residual ? ds : Tensor(),
                                         owned && serial && f.residual, flows, "d ffn_in");
      (serial ? ds : dx) = below;
      owned = true;
    }
    value_.n2.reset();
    value_.ffn_in.reset();
    if (serial && !flows) ds.reset();
  }
  if (spec_.has_attn && ds.defined() && (needs_[0] || attn_any)) {
    const AttentionSpec& a = spec_.attn;
    if (a.out.on()) {
      ensure_mid();
      const bool need_sum = needs_[0] || need_any(0, kAttnOutW) || need(kSinks);
      ds = norm_backward(ds, value_.mid, a.out, attn_slot(kAttnOutW), Tensor(), false, need_sum,
                         "d mid");
      owned = true;
    }
    value_.mid.reset();
    Tensor dn1 = ds.defined() ? attention_backward(ds) : Tensor();
    if (dn_shared.defined()) dn1 = dn1.defined() ? dn1.add_(dn_shared) : dn_shared;
    dn_shared.reset();
    const bool branch = dx.defined();  // the other branch's sum, ours to add to
    if (ds.defined()) {
      const Tensor beside = branch ? dx : a.residual ? ds : Tensor();
      const bool ours = branch || (owned && serial && a.residual);
      dx = norm_backward(dn1, x_, a.pre, attn_slot(kAttnPreW), beside, ours, needs_[0], "d x");
    }
  } else if (serial) {
    dx = ds;
  }
  return dx;
}

}  // namespace ckptfused
