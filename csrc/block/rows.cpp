// The block by tiles of queries: beside x, y and their gradients only k, v and theirs are as long
// as the sequences. A tile is the block of its rows, and reads all keys.
#include "ops/torch.h"

#include <algorithm>
#include <utility>

#include "block/block.h"
#include "block/held_weights.h"

namespace ckptfused {

using at::Tensor;

namespace {

Tensor some_of(const Tensor& t, int64_t dim, int64_t first, int64_t count) {
  return t.defined() ? t.narrow(dim, first, count) : t;
}

// Where a dimension is 1 it stands for all.
Tensor narrow_own(const Tensor& t, int64_t dim, int64_t first, int64_t count) {
  return t.defined() && t.size(dim) > 1 ? t.narrow(dim, first, count) : t;
}

}  // namespace

// The block of rows [row0, row0 + rows): of one batch element, or, where x is [T, B, C], of all.
Block Block::of_rows(int64_t row0, int64_t rows) const {
  Block part(*this);
  const bool seq_first = spec_.seq_first;
  const int64_t batches = seq_first ? B_ : 1, tokens = rows / batches;
  const int64_t batch = seq_first ? 0 : row0 / T_;
  const int64_t token = seq_first ? row0 / B_ : row0 % T_;
  part.B_ = batches;
  part.T_ = tokens;
  part.N_ = rows;
  part.x_ = x_.narrow(0, row0, rows);
  if (row_map_.size() < 3) part.row_map_ = {seq_first ? B_ : 1, seq_first ? T_ : N_, 0};
  part.row_map_[2] += row0;
  if (query_tile_.empty()) part.query_tile_ = {0, 0, T_};
  part.query_tile_[0] += batch;
  part.query_tile_[1] += token;

  const auto of_batch = [&](const Tensor& t) { return seq_first ? t : narrow_own(t, 0, batch, 1); };
  if (cos_.defined()) part.cos_ = of_batch(cos_).narrow(1, token, tokens).contiguous();
  if (sin_.defined()) part.sin_ = of_batch(sin_).narrow(1, token, tokens).contiguous();
  if (q_scale_.defined()) part.q_scale_ = of_batch(q_scale_).narrow(1, token, tokens);
  if (mask_.defined() && mask_.dim() == 4) part.mask_ = of_batch(mask_);
  if (padding_.defined() && padding_.dim() == 2) part.padding_ = of_batch(padding_);

  Values& v = part.value_;
  for (Tensor* rows_of : {&v.mid, &v.proj, &v.qkv, &v.gu, &v.out, &v.down}) {
    *rows_of = some_of(*rows_of, 0, row0, rows);
  }
  v.o = some_of(some_of(v.o, 0, batch, batches), 1, token, tokens);
  v.lse = some_of(some_of(v.lse, 0, batch, batches), 2, token, tokens);
  part.set_ffn_tiles();
  return part;
}

// What parts of a block have in common: they leave it here, for the next.
void Block::take_back(Block&& part) {
  part.sum_partials();
  cast_ = std::move(part.cast_);
  grads_ = std::move(part.grads_);
  adapter_halves_ = std::move(part.adapter_halves_);
  adapter_places_ = std::move(part.adapter_places_);
}

// Calls f with the block of each run of rows that share keys, of which every tile is a part.
template <typename F>
void Block::for_runs(F f) {
  const int64_t rows = spec_.seq_first ? N_ : T_;
  for (int64_t row0 = 0; row0 < N_; row0 += rows) {
    Block run = of_rows(row0, rows);
    f(run, row0);
    take_back(std::move(run));
  }
}

// Calls f with the block of each tile of a run.
template <typename F>
void Block::for_tiles(F f) {
  for (int64_t row0 = 0; row0 < N_; row0 += tile_rows_) {
    Block tile = of_rows(row0, std::min(tile_rows_, N_ - row0));
    f(tile, row0);
    take_back(std::move(tile));
  }
}

// k and v of a run.
void Block::make_keys() {
  keys_.k = key_heads(P_, "k and v");
  keys_.v = key_heads(P_, "k and v");
  for_tiles([&](Block& tile, int64_t row0) {
    tile.projected_ = Projected::k_and_v;
    const Tensor kept = tile.value_.qkv;
    if (!backward_) tile.value_ = {};
    tile.ensure_qk();
    tile.token_rows(keys_.k, row0).copy_(tile.value_.k);
    tile.token_rows(keys_.v, row0).copy_(tile.value_.v);
    if (!backward_ && kept.defined()) tile.copy_qkv(kept);
  });
}

// Heads [B, G, T, D] of k or v, token by token.
Tensor Block::key_heads(at::ScalarType type, const char* name) const {
  const AttentionSpec& a = spec_.attn;
  return heads_view(empty({N_, a.kv_width()}, type, name), {a.kv_heads, 0, a.head_dim});
}

// The rows of a tile that begins there among those of its run's heads [B, heads, T, D].
Tensor Block::token_rows(const Tensor& heads, int64_t row0) const {
  return heads.narrow(2, row0 / B_, T_);
}

// The columns of the raw product that a tile has made, to those that are kept.
void Block::copy_qkv(const Tensor& kept) const {
  for (const Part& part : qkv_parts()) {
    kept.narrow(1, part.col0, part.width).copy_(value_.qkv.narrow(1, part.col0, part.width));
  }
}

void Block::copy_kept(const Values& kept) const {
  const auto copy = [](const Tensor& to, const Tensor& from) {
    if (to.defined()) to.copy_(from);
  };
  if (kept.qkv.defined()) copy_qkv(kept.qkv);
  copy(kept.o, value_.o);
  copy(kept.lse, value_.lse);
  copy(kept.mid, value_.mid);
  copy(kept.proj, value_.proj);
  copy(kept.out, value_.out);
  copy(kept.down, value_.down);
  if (kept.gu.defined()) kept.gu.view({-1}).copy_(value_.gu.view({-1}));
}

Tensor Block::forward_in_tiles() {
  const KeepSpec& keep = spec_.keep;
  const AttentionSpec& a = spec_.attn;
  if (save_ && keep.attn) {
    value_.o = empty({B_, T_, a.q_width()}, P_, "o and lse");
    value_.lse = empty({B_, a.heads, T_}, A_, "o and lse");
  }
  if (save_ && keep.mid) value_.mid = like_x(R_, "mid");
  if (save_ && keep.proj) value_.proj = like_x(P_, "proj");
  if (save_ && keep.qkv) value_.qkv = empty({N_, a.qkv_width()}, P_, "qkv");
  if (save_ && keep.gu) value_.gu = empty({N_, spec_.ffn.gu_width()}, P_, "gu");
  if (save_ && keep.out) {
    const bool closing = spec_.ffn.out.on();
    (closing ? value_.out : value_.down) = like_x(closing ? R_ : P_, closing ? "out" : "down");
  }
  const Tensor y = like_x(R_, "y");
  const HeldWeights held(*this, true, 0);
  for_runs([&](Block& run, int64_t first) {
    run.make_keys();
    run.for_tiles([&](Block& tile, int64_t row0) {
      const Values kept = std::exchange(tile.value_, {});
      tile.projected_ = Projected::q;
      y.narrow(0, first + row0, tile.N_).copy_(tile.forward_rows());
      if (save_) tile.copy_kept(kept);
    });
    run.keys_ = {};
  });
  return y;
}

// The gradient of x, undefined where nobody needs it.
Tensor Block::backward_in_tiles(const Tensor& dy) {
  sums_ = true;
  const HeldWeights held(*this, true, 0);
  const Tensor dx = needs_[0] ? like_x(R_, "d x") : Tensor();
  for_runs([&](Block& run, int64_t first) {
    const auto rows_of = [&](const Tensor& t, const Block& tile, int64_t row0) {
      return some_of(t, 0, first + row0, tile.N_);
    };
    run.make_keys();
    run.keys_.dk = run.key_heads(A_, "d k and d v").zero_();
    run.keys_.dv = run.key_heads(A_, "d k and d v").zero_();
    run.for_tiles([&](Block& tile, int64_t row0) {
      tile.projected_ = Projected::q;
      const Tensor made = tile.backward_rows(rows_of(dy, tile, row0));
      if (dx.defined()) rows_of(dx, tile, row0).copy_(made);
    });
    const KeyValues sums = std::exchange(run.keys_, {});
    const bool flows = needs_[0] || need_any(attn_slot(kAttnPreW), attn_slot(kKNormB) + 1);
    if (!flows) return;
    run.for_tiles([&](Block& tile, int64_t row0) {
      tile.projected_ = Projected::k_and_v;
      tile.keys_backward(tile.token_rows(sums.dk, row0), tile.token_rows(sums.dv, row0),
                         rows_of(dx, tile, row0));
    });
  });
  return dx;
}

// The share of k and v in the gradients of x, which it adds to, and of parameters.
void Block::keys_backward(const Tensor& dk, const Tensor& dv, const Tensor& dx) {
  const AttentionSpec& a = spec_.attn;
  const auto narrowed = [&](const Tensor& sum) { return key_heads(P_, "d k and d v").copy_(sum); };
  const bool normed = a.qk.on() || a.v.on();
  if (normed) ensure_qkv();
  const Tensor raw = normed ? value_.qkv : Tensor();
  const Tensor dn1 = qkv_backward({}, narrowed(dk), narrowed(dv), raw);
  norm_backward(dn1, x_, a.pre, attn_slot(kAttnPreW), dx, /*dres_owned=*/true, needs_[0], "d x");
}

}  // namespace ckptfused
