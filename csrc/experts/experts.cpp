// The experts of a mixture: rows sorted by expert, products a group of rows at a time.
#include "ops/torch.h"

#include "experts/experts.h"

#include <algorithm>
#include <array>

#include "block/ops.h"
#include "ops/checks.h"
#include "ops/column_sums.h"
#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kOp = "experts";
constexpr int64_t kMostExperts = int64_t(1) << 15;
constexpr int64_t kCodesInByte = 2;  // of weights in few bits: all have four
constexpr std::array<const char*, kExpertsGrads> kNames = {
    "x", "weights", "up", "up_bias", "down", "down_bias", "up_a", "up_b", "down_a", "down_b"};

// t times a number for each row, rounded once.
Tensor scaled(const Tensor& t, const Tensor& scores) {
  return t.to(scores.scalar_type()).mul(scores).to(t.scalar_type());
}

}  // namespace

Tensor narrow_ids(const Tensor& ids, int64_t experts) {
  return ids.to(experts <= 256 ? at::kByte : at::kShort, false, true);
}

Experts::Experts(const ExpertsSpec& spec, const ExpertsTensors& tensors, std::vector<bool> needs)
    : spec_(spec), tensors_(tensors), needs_(std::move(needs)) {
  const Tensor &x = slot(kExpertsX), &ids = tensors.ids, &up = slot(kExpertsUp);
  const auto is_stack = [&](int i) { return slot(i).dim() == (spec.form(i).empty() ? 3 : 2); };
  TORCH_CHECK(x.dim() == 2 && ids.dim() == 2 && is_stack(kExpertsUp) && is_stack(kExpertsDown), kOp,
              ": expected x [N, C], ids [N, k] and stacks of weights [E, out, in], or of codes [E, "
              "bytes] in few bits, got ",
              x.sizes(), ", ", ids.sizes(), ", ", up.sizes(), " and ", slot(kExpertsDown).sizes());
  N_ = x.size(0);
  C_ = x.size(1);
  k_ = ids.size(1);
  E_ = up.size(0);
  const int64_t wide = spec.form(kExpertsUp).empty()
                           ? up.size(spec.transposed ? 2 : 1)
                           : up.size(1) * kCodesInByte / std::max<int64_t>(1, C_);
  I_ = wide / (spec.gated() ? 2 : 1);
  A_ = acc_dtype(x.scalar_type());
  P_ = spec.compute == at::ScalarType::Undefined ? x.scalar_type() : spec.compute;
  check();
  sort_rows();
}

void Experts::check() const {
  const Tensor& x = slot(kExpertsX);
  const int64_t wide = I_ * (spec_.gated() ? 2 : 1);
  const auto rank = [&](int a) {
    TORCH_CHECK(slot(a).defined() == slot(a + 1).defined(), kOp, ": expected ", kNames[a], " and ",
                kNames[a + 1], ", or neither of them");
    return slot(a).defined() && slot(a).dim() == 3 ? slot(a).size(1) : 0;
  };
  const auto stack = [&](int i) -> std::vector<int64_t> {
    const auto [rows, columns] = matrix_sizes(i);
    if (spec_.form(i).empty()) return {E_, rows, columns};
    return {E_, rows * columns / kCodesInByte};
  };
  const std::array<std::vector<int64_t>, kExpertsGrads> sizes = {{{N_, C_},
                                                                  {N_, k_},
                                                                  stack(kExpertsUp),
                                                                  {E_, wide},
                                                                  stack(kExpertsDown),
                                                                  {E_, C_},
                                                                  {E_, rank(kExpertsUpA), C_},
                                                                  {E_, wide, rank(kExpertsUpA)},
                                                                  {E_, rank(kExpertsDownA), I_},
                                                                  {E_, C_, rank(kExpertsDownA)}}};
  for (int i = 0; i < kExpertsGrads; ++i) {
    const Tensor& given = slot(i);
    if (!given.defined()) continue;
    const bool codes = !spec_.form(i).empty();
    TORCH_CHECK(given.sizes() == at::IntArrayRef(sizes[i]) && given.device() == x.device() &&
                    (codes ? given.scalar_type() == at::kByte : given.is_floating_point()),
                kOp, ": ", kNames[i], ": expected ", codes ? "bytes " : "floating-point ",
                at::IntArrayRef(sizes[i]), " on ", x.device(), ", got ", given.scalar_type(), " ",
                given.sizes(), " on ", given.device());
    const int scale = experts_state(i) + kScale;
    TORCH_CHECK(!codes || slot(scale).defined(), kOp, ": ", kNames[i], ": codes without scales");
    check_memory(kOp, kNames[i], given);
  }
  const Tensor& ids = tensors_.ids;
  TORCH_CHECK(ids.size(0) == N_ && k_ > 0 && ids.device() == x.device() &&
                  at::isIntegralType(ids.scalar_type(), /*includeBool=*/false),
              kOp, ": ids: expected integers [", N_, ", k] on ", x.device(), ", got ",
              ids.scalar_type(), " ", ids.sizes(), " on ", ids.device());
  TORCH_CHECK(E_ > 0 && E_ <= kMostExperts, kOp, ": expected 1 to ", kMostExperts, " experts, got ",
              E_);
}

// What the first product makes: forward's and, again, backward's.
Experts::Hidden Experts::hidden(const Tensor& x, const Group& group) {
  const Tensor both = empty({group.count, I_ * (spec_.gated() ? 2 : 1)}, P_);
  std::optional<Tensor> added;
  if (slot(kExpertsUpBias).defined()) added = bias(kExpertsUpBias, group);
  if (group.single()) {
    linear_out(both, x, weight(kExpertsUp, group), added, spec_.transposed);
  } else {
    multiply(kExpertsUp, both, x, group, /*back=*/false, /*add=*/false);
    if (added) Tensor(both).add_(*added);
  }
  add_adapter(kExpertsUpA, x, group, both);
  return split(both);
}

// Of several groups they are summed in float32 (float64), as are biases and products of another
// type than the slot's. A count has to have room for that, whatever the ids will be.
void Experts::begin_sums(const Group& group) {
  if (!group.begins || !group.single()) return;  // grouped products round once by themselves
  const at::ScalarType wide = acc_dtype(P_);
  const bool whole = group.ends && !(counting() && E_ > 1);
  for (int i = kExpertsUp; i < kExpertsGrads; ++i) {
    if (!grads_[i].defined()) continue;
    const Tensor part = grads_[i].select(0, group.expert);
    if (part.dim() == 1) {
      sums_[i] = empty(part.sizes(), A_);
    } else if (part.scalar_type() == wide || (whole && part.scalar_type() == P_)) {
      sums_[i] = part;
    } else {
      sums_[i] = empty(part.sizes(), wide);
    }
  }
}

void Experts::add_rows(int i, const Tensor& rows, const Group& group) {
  column_sums_out(sums_[i], rows, !group.begins);
}

void Experts::finish(const Group& group) {
  if (!group.ends) return;
  up_numbers_.reset();
  for (int i = 0; i < kExpertsGrads; ++i) {
    if (!sums_[i].defined()) continue;
    const Tensor part = grads_[i].select(0, group.expert);
    if (!part.is_alias_of(sums_[i])) part.copy_(sums_[i]);
    sums_[i].reset();
  }
}

Tensor Experts::forward() {
  const Tensor sorted = empty({N_ * k_, C_}, P_);
  for (const Group& group : groups_) {
    const Tensor score = scores(group);
    const Tensor h = scaled(activated(hidden(rows_of(slot(kExpertsX), group), group)), score);
    const Tensor out = sorted.narrow(0, group.first, group.count);
    multiply(kExpertsDown, out, h, group, /*back=*/false, /*add=*/false);
    add_adapter(kExpertsDownA, h, group, out);
    if (slot(kExpertsDownBias).defined()) {
      const Tensor added = bias(kExpertsDownBias, group).to(A_).mul(score);
      // See beside_wide.
      on_cpu(out) ? out.copy_(out.to(A_).add_(added)) : out.add_(added);
    }
    if (group.ends) up_numbers_.reset();
  }
  return combined(sorted);
}

std::vector<Tensor> Experts::backward(const Tensor& dy) {
  TORCH_CHECK(dy.sizes() == slot(kExpertsX).sizes(), kOp, ": dy: expected ",
              slot(kExpertsX).sizes(), ", got ", dy.sizes());
  grads_.assign(kExpertsGrads, {});
  sums_.assign(kExpertsGrads, {});
  const Tensor dx = need(kExpertsX) ? empty({N_ * k_, C_}, P_) : Tensor();
  const Tensor dscore = need(kExpertsWeights) ? empty({N_ * k_}, A_) : Tensor();
  for (int i = kExpertsUp; i < kExpertsGrads; ++i) {
    if (!need(i)) continue;
    grads_[i] = at::empty(slot(i).sizes(), slot(i).options());
  }
  const auto any_of = [&](std::initializer_list<int> slots) {
    return std::any_of(slots.begin(), slots.end(), [&](int i) { return need(i); });
  };
  const bool below = any_of({kExpertsX, kExpertsUp, kExpertsUpBias, kExpertsUpA, kExpertsUpB});
  const bool t = spec_.transposed;
  for (const Group& group : groups_) {
    begin_sums(group);
    const Tensor dout = rows_of(dy, group), score = scores(group);
    if (need(kExpertsDownBias)) add_rows(kExpertsDownBias, dout.to(A_).mul(score), group);
    const Tensor x = rows_of(slot(kExpertsX), group);
    const Hidden replayed = hidden(x, group);
    const Tensor h = activated(replayed);
    Tensor weighted, dh;
    if (any_of({kExpertsDown, kExpertsDownA, kExpertsDownB})) weighted = scaled(h, score);
    if (need(kExpertsDown)) {
      add_product(kExpertsDown, t ? weighted.t() : dout.t(), t ? dout : weighted, group);
    }
    if (below || dscore.defined()) {
      dh = empty({group.count, I_}, P_);
      multiply(kExpertsDown, dh, dout, group, /*back=*/true, /*add=*/false);
    }
    adapter_backward(kExpertsDownA, weighted, dout, group, dh);
    if (dscore.defined()) {
      Tensor sum = dscore.narrow(0, group.first, group.count);
      at::sum_out(sum, h.to(A_).mul(beside_wide(dh, A_)), 1);
      if (slot(kExpertsDownBias).defined()) {
        sum.add_(dout.to(A_).mul(bias(kExpertsDownBias, group).to(A_)).sum(1));
      }
    }
    if (!below) {
      finish(group);
      continue;
    }
    const Tensor dboth = activation_gradient(replayed, scaled(dh, score));
    if (need(kExpertsUpBias)) add_rows(kExpertsUpBias, dboth, group);
    if (need(kExpertsUp)) add_product(kExpertsUp, t ? x.t() : dboth.t(), t ? dboth : x, group);
    Tensor dx_rows;
    if (dx.defined()) {
      dx_rows = dx.narrow(0, group.first, group.count);
      multiply(kExpertsUp, dx_rows, dboth, group, /*back=*/true, /*add=*/false);
    }
    adapter_backward(kExpertsUpA, x, dboth, group, dx_rows);
    finish(group);
  }
  for (int64_t e : idle_) {
    for (int i = kExpertsUp; i < kExpertsGrads; ++i) {
      if (grads_[i].defined()) grads_[i].select(0, e).zero_();
    }
  }
  if (dx.defined()) grads_[kExpertsX] = combined(dx);
  if (dscore.defined()) {
    grads_[kExpertsWeights] = dscore.index_select(0, place_.t().reshape({-1}))
                                  .view({N_, k_})
                                  .to(slot(kExpertsWeights).scalar_type());
  }
  std::vector<Tensor> result;
  for (int i = 0; i < kExpertsGrads; ++i) {
    if (need(i)) result.push_back(std::move(grads_[i]));
  }
  return result;
}

}  // namespace ckptfused
