// The FFN half: n2 -> gu -> h -> down, tile by tile, and back.
#include "ops/torch.h"

#include <utility>

#include "block/block.h"
#include "block/held_weights.h"
#include "kernels/activation.h"
#include "math/dropout.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

std::vector<Block::Tile> Block::tiles() const {
  std::vector<Tile> list;
  const int64_t F = spec_.ffn.hidden;
  // No tokens are one empty tile, so that every value and gradient gets made.
  if (N_ == 0) return {{0, 0, 0, F}};
  for (int64_t row0 = 0; row0 < N_; row0 += tiles_.rows) {
    for (int64_t col0 = 0; col0 < F; col0 += tiles_.cols) {
      list.push_back(
          {row0, std::min(tiles_.rows, N_ - row0), col0, std::min(tiles_.cols, F - col0)});
    }
  }
  return list;
}

Block::GateUp Block::gate_up(const Tensor& buffer, const Tile& t) const {
  if (!spec_.ffn.gated()) return {buffer, Tensor(), buffer};
  return {buffer, buffer.narrow(1, 0, t.cols), buffer.narrow(1, t.cols, t.cols)};
}

// The products that make one tile of gu: gate columns first, then up.
std::vector<Part> Block::gu_parts(const Tile& t) const {
  const FFNSpec& f = spec_.ffn;
  const int gate_w = ffn_slot(kFFNGateW), gate_b = ffn_slot(kFFNGateB);
  const int up_w = ffn_slot(kUpW), up_b = ffn_slot(kUpB);
  if (!f.gated()) return {{up_w, up_b, t.col0, t.cols, 0}};
  if (!f.joint) return {{gate_w, gate_b, t.col0, t.cols, 0}, {up_w, up_b, t.col0, t.cols, t.cols}};
  if (t.cols == f.hidden) return {{gate_w, gate_b, 0, 2 * f.hidden, 0}};
  return {{gate_w, gate_b, t.col0, t.cols, 0}, {gate_w, gate_b, f.hidden + t.col0, t.cols, t.cols}};
}

// The buffer of a tile of the kept gu: a tile's rows lie together, as in a buffer of its own, so
// that the product may write there. Undefined where gu is not kept.
Tensor Block::kept_gu(const Tile& t) const {
  if (!value_.gu.defined()) return {};
  const FFNSpec& f = spec_.ffn;
  const int64_t width = f.gated() ? 2 * t.cols : t.cols;
  const int64_t first = f.gu_width() * t.row0 + (f.gated() ? 2 : 1) * N_ * t.col0;
  return value_.gu.view({-1}).narrow(0, first, t.rows * width).view({t.rows, width});
}

// One tile of gu: the kept values, or the product. The product always goes to a buffer of the same
// strides, kept or not, because those may choose the platform's kernel.
Block::GateUp Block::make_gu(const Tile& t) {
  const FFNSpec& f = spec_.ffn;
  const Tensor kept = kept_gu(t);
  if (backward_ && kept.defined()) {
    GateUp gu = gate_up(kept, t);
    gu.buffer.reset();  // not for writing
    return gu;
  }
  if (replayed_gu_.buffer.defined()) return std::exchange(replayed_gu_, {});
  ensure_n2();
  const Tensor buffer =
      kept.defined() ? kept : empty({t.rows, f.gated() ? 2 * t.cols : t.cols}, P_, "gu tile");
  project("gu", buffer, part_of(value_.n2, 0, t.row0, t.rows), gu_parts(t), f.transposed, t.row0,
          join(t));
  return gate_up(buffer, t);
}

void Block::activate(const GateUp& gu, const Tile& t, const Tensor& h) const {
  const FFNSpec& f = spec_.ffn;
  call::activation_fwd(f.gated() ? gu.gate : gu.up, gu.up, rng_, h, f.act, f.p_hidden,
                       int(DropoutSite::ffn_hidden), f.hidden, t.row0, t.col0, row_map(),
                       coefficients());
}

// h over dh, and the gradients of gate and up, those that are wanted; of the activation's
// coefficients, the sums are added up.
void Block::activation_backward(const GateUp& gu, const Tile& t, const Tensor& h, bool need_h,
                                const GateUp& dgu) {
  const FFNSpec& f = spec_.ffn;
  Tensor sums;
  if (need(ffn_slot(kCoefficients))) {
    sums = empty({coefficient_sums(t.rows, t.cols), 4}, A_, "sums of an activation's coefficients");
    sums.zero_();
  }
  call::activation_bwd(f.gated() ? gu.gate : gu.up, gu.up, h, rng_, need_h ? h : Tensor(), dgu.gate,
                       dgu.up, f.act, f.p_hidden, int(DropoutSite::ffn_hidden), f.hidden, t.row0,
                       t.col0, row_map(), coefficients(), sums);
  if (sums.defined()) add_bias_grad(ffn_slot(kCoefficients), 0, sums, t.row0 > 0 || t.col0 > 0);
}

Tensor Block::coefficients() const {
  const Tensor& given = param(ffn_slot(kCoefficients));
  const Ledger::Name name("cast", ffn_slot(kCoefficients));
  return given.defined() ? given.to(A_) : given;
}

// Backward of a block with a norm behind the FFN makes h twice, by way of a gu that may be kept:
// there the pointwise kernel serves both.
bool may_fuse_up(const FFNSpec& f, int64_t rows) {
  return !f.post.on() && !f.out.on() && rows > 0 && f.lora.empty() && f.quant.empty() &&
         f.act != "xielu";
}

void Block::choose_up_kernel() {
  const FFNSpec& f = spec_.ffn;
  const bool half = is_half(P_);
  if (!half || !may_fuse_up(f, N_)) return;
  up_kernel_ = call::ffn_choice(x_, P_, N_, C_, f.hidden, f.act);
}

call::UpWeights Block::up_weights(const Tile& t) {
  const FFNSpec& f = spec_.ffn;
  const auto columns = [&](int slot, int64_t col0) {
    const Tensor w = weight(ffn_slot(slot));
    return w.defined() ? part_of(w, f.transposed ? w.dim() - 1 : 0, col0, t.cols) : w;
  };
  if (!f.gated()) return {Tensor(), Tensor(), columns(kUpW, t.col0), columns(kUpB, t.col0)};
  const int64_t up0 = f.joint ? f.hidden + t.col0 : t.col0;
  return {columns(kFFNGateW, t.col0), columns(kFFNGateB, t.col0),
          columns(f.joint ? kFFNGateW : kUpW, up0), columns(f.joint ? kFFNGateB : kUpB, up0)};
}

// The columns of the down projection that read a tile of h.
Tensor Block::down_weight(const Tile& t) {
  return part_of(weight(ffn_slot(kDownW)), spec_.ffn.transposed ? 0 : 1, t.col0, t.cols);
}

call::HiddenMask Block::hidden_mask(const Tile& t) const {
  const FFNSpec& f = spec_.ffn;
  return {f.p_hidden > 0 ? rng_ : Tensor(),
          f.p_hidden,
          int(DropoutSite::ffn_hidden),
          f.hidden,
          t.row0,
          t.col0,
          row_map()};
}

// Half-precision products add up wide and round once, so that one may add to the residual stream
// itself, where nothing comes between.
bool Block::down_adds() const {
  const FFNSpec& f = spec_.ffn;
  const bool half = is_half(P_);
  return half && R_ == P_ && spec_.has_attn && !f.post.on() && !f.out.on() && f.p_res == 0 &&
         f.m == 1.0 && f.lora.empty() && !param(ffn_slot(kDownB)).defined();
}

void Block::ensure_down(const Tensor& onto) {
  if (value_.down.defined()) return;
  const FFNSpec& f = spec_.ffn;
  const HeldWeights held(*this, tiled(), ffn_slot(0));
  const std::vector<Part> part = {{ffn_slot(kDownW), ffn_slot(kDownB), 0, C_, 0}};
  const bool cut_cols = tiles_.cols < f.hidden;
  Tensor down;
  const Tensor h = cut_cols ? empty({N_, f.hidden}, P_, "h") : Tensor();
  const auto hidden_tile = [&](const Tile& t) {
    return cut_cols ? h.narrow(1, t.col0, t.cols) : empty({t.rows, f.hidden}, P_, "h");
  };
  const auto product = [&](const Tensor& out, const Tensor& in, int64_t row0) {
    if (!onto.defined()) return project("down", out, in, part, f.transposed, row0);
    const Ledger::Name name("down");
    const Tensor w = weight(ffn_slot(kDownW));
    matmul_out(out, in, f.transposed ? w : w.t(), true);
  };
  const auto release_input = [&](const Tile& t) {
    const bool last = t.row0 + t.rows == N_ && t.col0 + t.cols == f.hidden;
    if (backward_ || !last) return;
    value_.n1.reset();
    value_.n2.reset();
  };
  for (const Tile& t : tiles()) {
    begin(t);
    Tensor h_tile;
    if (one_kernel()) {
      ensure_n2();
      h_tile = hidden_tile(t);
      const Tensor buffer = kept_gu(t);
      const GateUp kept = buffer.defined() ? gate_up(buffer, t) : GateUp();
      call::ffn_up_fwd(part_of(value_.n2, 0, t.row0, t.rows), up_weights(t), h_tile, kept.gate,
                       kept.up, f.act, f.transposed, hidden_mask(t), up_kernel_);
      release_input(t);
    } else {
      GateUp gu = make_gu(t);
      release_input(t);
      h_tile = hidden_tile(t);
      activate(gu, t, h_tile);
      // Backward goes through gu again: an uncut one is worth holding, a tile is made anew.
      if (backward_ && !tiled()) replayed_gu_ = std::move(gu);
    }
    if (cut_cols) continue;
    if (!down.defined()) down = onto.defined() ? onto : like_x(P_, "down");
    product(part_of(down, 0, t.row0, t.rows), h_tile, t.row0);
  }
  joined_ = {};
  if (cut_cols) {
    down = onto.defined() ? onto : like_x(P_, "down");
    product(down, h, 0);
  }
  if (!onto.defined()) value_.down = down;
}

Tensor Block::ffn_backward(const Tensor& ds, bool need_n2) {
  const FFNSpec& f = spec_.ffn;
  const int down_w = ffn_slot(kDownW), down_b = ffn_slot(kDownB);
  const bool need_gate_up = need_any(ffn_slot(kFFNGateW), ffn_slot(kUpB) + 1);
  const bool need_gu = need_n2 || need_gate_up || need(ffn_slot(kCoefficients));
  const bool need_h = need_any(down_w, down_w + 1);
  if (!need_gu && !need_any(down_w, ffn_slot(kFFNPostB) + 1)) return {};
  const HeldWeights held(*this, tiled(), ffn_slot(0));

  if (f.post.on()) ensure_down();
  const Tensor ddown =
      residual_backward(ds, value_.down, f, ffn_slot(kFFNPostW), int(DropoutSite::ffn_residual));
  value_.down.reset();
  add_bias_grad(down_b, 0, ddown, false);
  if (!need_gu && !need_h) return {};

  // Where the hidden width is cut, the input gradient is a sum over tiles and is held wide.
  const bool cut_cols = tiles_.cols < f.hidden;
  const Part down_part{down_w, down_b, 0, C_, 0};
  Tensor dn2;
  bool first = true;
  for (const Tile& t : tiles()) {
    begin(t);
    const Tensor ddown_tile = part_of(ddown, 0, t.row0, t.rows);
    GateUp dgu;
    Tensor h;
    if (one_kernel()) {
      const Tensor buffer = kept_gu(t);
      const GateUp kept = buffer.defined() ? gate_up(buffer, t) : GateUp();
      if (!kept.up.defined()) ensure_n2();
      if (need_h) h = empty({t.rows, t.cols}, P_, "h");
      if (need_gu)
        dgu = gate_up(empty({t.rows, f.gated() ? 2 * t.cols : t.cols}, P_, "gu tile"), t);
      call::ffn_up_bwd(kept.up.defined() ? Tensor() : part_of(value_.n2, 0, t.row0, t.rows),
                       kept.up.defined() ? call::UpWeights() : up_weights(t), kept.gate, kept.up,
                       ddown_tile, down_weight(t), h, dgu.gate, dgu.up, f.act, f.transposed,
                       hidden_mask(t), up_kernel_);
    } else {
      GateUp gu = make_gu(t);
      h = empty({t.rows, t.cols}, P_, "h");  // dh, and then h over it
      if (need_gu) {
        {
          const Tensor w = down_weight(t);
          const Ledger::Name name("d h");
          matmul_out(h, ddown_tile, f.transposed ? w.t() : w, false);
        }
        adapters_backward(ddown_tile, Tensor(), down_part, h, t.row0, t.col0, f.hidden);
        // The kernel writes over its scratch, but never over a saved value.
        dgu = gu.buffer.defined()
                  ? gu
                  : gate_up(empty({t.rows, f.gated() ? 2 * t.cols : t.cols}, P_, "gu tile"), t);
        activation_backward(gu, t, h, need_h, dgu);
      } else {
        activate(gu, t, h);
      }
    }
    const bool add_rows = t.row0 > 0;
    if (need_h) {
      add_weight_grad(down_w, f.transposed, 0, C_, t.col0, t.cols, ddown_tile, h, add_rows);
      adapters_backward(ddown_tile, h, down_part, Tensor(), t.row0, t.col0, f.hidden);
    }
    h.reset();
    if (!need_gu) continue;
    if (need_gate_up) ensure_n2();
    if (need_n2 && !dn2.defined()) dn2 = like_x(cut_cols ? A_ : P_, "d n2");
    project_backward(
        dgu.buffer, value_.n2.defined() ? part_of(value_.n2, 0, t.row0, t.rows) : Tensor(),
        gu_parts(t), f.transposed, dn2.defined() ? part_of(dn2, 0, t.row0, t.rows) : Tensor(),
        add_rows, cut_cols && !first, t.row0, dn2.defined() ? join(t) : joined_);
    first = false;
  }
  joined_ = {};
  // Sums over row tiles are done: attention's backward, which comes next, holds them narrow.
  if (!sums_)
    for (const int slot : {ffn_slot(kFFNGateW), ffn_slot(kUpW), down_w}) {
      const Ledger::Name name("d", slot);
      if (grads_[slot].defined()) grads_[slot] = grads_[slot].to(params_[slot].scalar_type());
    }
  const Ledger::Name name("d n2");
  return dn2.defined() && cut_cols ? dn2.to(P_) : dn2;
}

}  // namespace ckptfused
