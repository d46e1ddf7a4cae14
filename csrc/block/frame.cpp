// The frame around what a half computes: its norms, the sum with the residual stream, and the
// gradients of their vectors. A modulated half's vectors have a row for each batch element.
#include "ops/torch.h"

#include <algorithm>

#include "block/block.h"

namespace ckptfused {

using at::Tensor;

namespace {

bool has_rows(const Tensor& vectors) {
  return vectors.defined() && vectors.dim() == 2;
}

}  // namespace

// All rows, or, where one of these slots has a vector for each batch element, those of each.
std::vector<Block::Rows> Block::rows_by_vector(std::initializer_list<int> slots) const {
  if (std::none_of(slots.begin(), slots.end(), [&](int slot) { return has_rows(param(slot)); })) {
    return {{0, N_, -1}};
  }
  const int64_t first = query_tile_.empty() ? 0 : query_tile_[0];
  std::vector<Rows> found;
  for (int64_t batch = 0; batch < B_; ++batch) found.push_back({batch * T_, T_, first + batch});
  return found;
}

Tensor Block::Rows::of(const Tensor& t) const {
  return t.defined() && sample >= 0 ? t.narrow(0, first, count) : t;
}

Tensor Block::vector(int slot, const Rows& rows) const {
  const Tensor& p = param(slot);
  return has_rows(p) ? p.select(0, rows.sample).contiguous() : p;
}

// Where in the tensor of all rows these lie, as dropout counts them.
std::vector<int64_t> Block::row_map_of(const Rows& rows) const {
  if (rows.sample < 0) return row_map_;
  if (row_map_.size() < 3) return {1, N_, rows.first};
  return {row_map_[0], row_map_[1], row_map_[2] + rows.first};
}

Tensor Block::pre_norm(const Tensor& x, const NormSpec& norm, int weight, int bias,
                       at::ScalarType type, const char* name) {
  const Ledger::Name named(name);
  if (!norm.on()) return x.scalar_type() == type ? x : x.to(type);
  const Tensor y = like_x(type, name);
  for (const Rows& rows : rows_by_vector({weight, bias})) {
    call::norm_fwd(rows.of(x), vector(weight, rows), vector(bias, rows), rows.of(y), norm.kind,
                   norm.eps);
  }
  return y;
}

// sum = x + m * drop(post(f)), normed = next(sum); either output may be undefined. Without a
// residual x is zeros.
void Block::close(const Tensor& x, const Tensor& f, const HalfSpec& half, int post_weight, int site,
                  const NormSpec& next, int next_weight, const Tensor& sum, const Tensor& normed) {
  const bool with_next = normed.defined();
  const Tensor start = half.residual ? x : like_x(R_, "zeros").zero_();
  if (!with_next) next_weight = post_weight;
  for (const Rows& rows : rows_by_vector({post_weight, next_weight, next_weight + 1})) {
    call::residual_fwd(
        rows.of(start), rows.of(f), half.p_res > 0 ? rng_ : Tensor(), vector(post_weight, rows),
        vector(post_weight + 1, rows), with_next ? vector(next_weight, rows) : Tensor(),
        with_next ? vector(next_weight + 1, rows) : Tensor(), rows.of(sum), rows.of(normed),
        half.post.kind, half.post.eps, with_next ? next.kind : "none", next.eps, half.m, half.p_res,
        site, row_map_of(rows));
  }
}

Tensor Block::residual_backward(const Tensor& ds, const Tensor& f, const HalfSpec& half,
                                int post_weight, int site) {
  if (!half.post.on() && half.p_res == 0 && half.m == 1.0 && R_ == P_) return ds;
  Tensor df = like_x(P_, "d f");
  for (const Rows& rows : rows_by_vector({post_weight})) {
    call::residual_bwd(rows.of(ds), half.post.on() ? rows.of(f) : Tensor(),
                       half.p_res > 0 ? rng_ : Tensor(), vector(post_weight, rows), rows.of(df),
                       grad_partials(post_weight, rows), grad_partials(post_weight + 1, rows),
                       half.post.kind, half.post.eps, half.m, half.p_res, site, row_map_of(rows));
  }
  return df;
}

Tensor Block::norm_backward(const Tensor& dn, const Tensor& x, const NormSpec& norm, int weight,
                            const Tensor& dres, bool dres_owned, bool need_dx, const char* name) {
  if (!dn.defined()) return dres;
  if (!norm.on() && !dres.defined()) return need_dx ? dn.to(R_) : Tensor();
  if (!need_dx && !(norm.on() && (need(weight) || need(weight + 1)))) return {};
  const Tensor dx = !need_dx ? Tensor() : dres_owned ? dres : like_x(R_, name);
  for (const Rows& rows : rows_by_vector({weight, weight + 1})) {
    call::norm_bwd(rows.of(dn), rows.of(x), norm.on() ? vector(weight, rows) : Tensor(),
                   need_dx ? rows.of(dres) : Tensor(), rows.of(dx),
                   norm.on() ? grad_partials(weight, rows) : Tensor(),
                   norm.on() ? grad_partials(weight + 1, rows) : Tensor(), norm.kind, norm.eps);
  }
  return dx;
}

Tensor Block::grad_partials(int slot, const Rows& rows) {
  return grad_partials(slot, {rows.count, C_, 0}, has_rows(param(slot)) ? rows.sample : -1);
}

Tensor Block::grad_partials(int slot, const int64_t (&rows)[3], int64_t sample) {
  if (!need(slot)) return {};
  const int64_t chunks = call::grad_chunks(x_, rows[0], rows[1], rows[2]);
  const Tensor sums = empty({chunks, rows[1]}, A_, "partial sums of a norm's gradients");
  partials_.push_back({slot, sample, sums});
  return sums;
}

// The gradients of norms' parameters, by one kernel on a GPU.
void Block::sum_partials() {
  std::vector<Tensor> partials, sums;
  for (const Partial& one : partials_) {
    const Tensor& p = params_[one.slot];
    const at::ScalarType type = sums_ ? A_ : p.scalar_type();
    Tensor& grad = grads_[one.slot];
    if (one.sample >= 0 && !grad.defined()) {
      grad = empty(p.sizes(), type, "d", one.slot);
      if (sums_) grad.zero_();
    }
    partials.push_back(one.sums);
    sums.push_back(one.sample >= 0 && !sums_ ? grad.select(0, one.sample)
                                             : empty({p.size(-1)}, type, "d", one.slot));
  }
  if (!partials.empty()) call::sum_grads(partials, sums);
  for (size_t i = 0; i < sums.size(); ++i) {
    Tensor& grad = grads_[partials_[i].slot];
    if (sums_ && grad.defined()) {
      (partials_[i].sample < 0 ? grad : grad.select(0, partials_[i].sample)).add_(sums[i]);
    } else if (partials_[i].sample < 0) {
      grad = sums[i];
    }
  }
  partials_.clear();
}

}  // namespace ckptfused
