// A call's rows: sorted by expert, in groups, and summed again by token.
#include "ops/torch.h"

#include <algorithm>

#include "experts/experts.h"
#include "ops/ledger.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kOp = "experts";
// Rows of which a product takes about as long as to read its weight: fewer are no group apart.
constexpr int64_t kFewRows = 128;

}  // namespace

// A stable sort: an expert's rows are in the order of tokens, and of their choices.
void Experts::sort_rows() {
  const Tensor flat = tensors_.ids.reshape({-1}).to(at::kLong).contiguous();
  const int64_t rows = flat.numel();
  std::vector<int64_t> first(E_ + 1, 0);
  const auto outside = [&](int64_t id) {
    TORCH_CHECK_INDEX(0 <= id && id < E_, kOp, ": ids: expected experts 0 to ", E_ - 1, ", got ",
                      id);
  };
  const int64_t most = std::max((3 * rows / 2 + E_ - 1) / E_, kFewRows);
  if (counting()) {
    order_ = at::empty_like(flat);
    place_ = at::empty_like(flat);
    for (int64_t e = 1; e <= E_; ++e) first[e] = std::min(rows, e * most);
  } else if (on_cpu(flat)) {
    const int64_t* id = flat.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i) {
      outside(id[i]);
      ++first[id[i] + 1];
    }
    for (int64_t e = 0; e < E_; ++e) first[e + 1] += first[e];
    order_ = at::empty_like(flat);
    place_ = at::empty_like(flat);
    int64_t *order = order_.mutable_data_ptr<int64_t>(),
            *place = place_.mutable_data_ptr<int64_t>();
    std::vector<int64_t> next = first;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = next[id[i]]++;
      place[i % k_ * N_ + i / k_] = row;
      order[row] = i;
    }
  } else {
    const auto [sorted, order] = at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    order_ = order;
    place_ = at::empty_like(order).scatter_(0, order, at::arange(rows, order.options()));
    place_ = place_.view({N_, k_}).t().contiguous();
    const Tensor bounds = at::searchsorted(sorted, at::arange(E_ + 1, flat.options())).cpu();
    first.assign(bounds.const_data_ptr<int64_t>(), bounds.const_data_ptr<int64_t>() + E_ + 1);
    if (first[0] > 0 || first[E_] < rows) {
      outside(first[0] > 0 ? sorted[0].item<int64_t>() : sorted[rows - 1].item<int64_t>());
    }
  }
  token_ = order_.div(k_, "floor");
  place_ = place_.view({k_, N_});
  for (int64_t e = 0; e < E_; ++e) add_groups(e, first[e], first[e + 1], most);
}

Tensor beside_wide(const Tensor& t, at::ScalarType wide) {
  return on_cpu(t) ? t.to(wide) : t;
}

// Rows [first, end) of an expert in as few groups as have no more than `most` rows each, all about
// as large. `most` is half as much again as an expert would have were all alike, which few have
// more than: what a call takes at most is known before the ids are, and no router can make it more.
void Experts::add_groups(int64_t expert, int64_t first, int64_t end, int64_t most) {
  for (int64_t left = end - first; left > 0; left = end - first) {
    const int64_t groups = (left + most - 1) / most, count = (left + groups - 1) / groups;
    const bool begins = groups_.empty() || groups_.back().expert != expert;
    groups_.push_back({expert, first, count, begins, groups == 1});
    first += count;
  }
}

// The rows of t [N, C] that go to a group's expert, as products take them.
Tensor Experts::rows_of(const Tensor& t, const Group& group) const {
  return t.index_select(0, token_.narrow(0, group.first, group.count)).to(P_);
}

Tensor Experts::scores(const Group& group) const {
  const Tensor rows = order_.narrow(0, group.first, group.count);
  return slot(kExpertsWeights).reshape({-1}).index_select(0, rows).to(A_).unsqueeze(1);
}

// Each token's sum over its choices, one after the other: no order but theirs, no atomics.
Tensor Experts::combined(const Tensor& sorted) const {
  const Tensor sum = empty({N_, C_}, A_);
  for (int64_t j = 0; j < k_; ++j) {
    const Tensor rows = sorted.index_select(0, place_[j]);
    j == 0 ? sum.copy_(rows) : sum.add_(beside_wide(rows, A_));
  }
  return sum.to(slot(kExpertsX).scalar_type());
}

}  // namespace ckptfused
