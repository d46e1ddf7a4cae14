// A call's rows: sorted by expert, in groups, and summed again by token.
#include "ops/torch.h"

#include <algorithm>

#include "experts/experts.h"
#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kOp = "experts";
// Rows of which a product takes about as long as to read its weight: fewer are no group apart.
constexpr int64_t kFewRows = 128;
// Rows of a grouped product that keep a GPU busier than the launches around it keep the host.
constexpr int64_t kGroupedRows = 8192;
// Experts of which a grouped product is not worth its way, and bytes of their weights in another
// form, and of gradients, that may be there at once.
constexpr int64_t kFewExperts = 4, kBytesBeside = int64_t(64) << 20;

// Whether a tensor begins at a multiple of so many bytes. A count has none.
bool lies_at(const Tensor& t, uintptr_t bytes) {
  return counting() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
}

}  // namespace

// A stable sort: an expert's rows are in the order of tokens, and of their choices.
void Experts::sort_rows() {
  const Tensor flat = tensors_.ids.reshape({-1}).to(at::kLong).contiguous();
  const int64_t rows = flat.numel();
  std::vector<int64_t> first(E_ + 1, 0);
  Tensor bounds;
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
    bounds = at::searchsorted(sorted, at::arange(E_ + 1, flat.options()));
    const Tensor here = bounds.cpu();
    first.assign(here.const_data_ptr<int64_t>(), here.const_data_ptr<int64_t>() + E_ + 1);
    if (first[0] > 0 || first[E_] < rows) {
      outside(first[0] > 0 ? sorted[0].item<int64_t>() : sorted[rows - 1].item<int64_t>());
    }
  }
  token_ = order_.div(k_, "floor");
  place_ = place_.view({k_, N_});
  for (int64_t e = 0; e < E_; ++e) {
    if (first[e] == first[e + 1]) idle_.push_back(e);
  }
  if (const int64_t grouped = most_grouped(); grouped > 1) {
    if (slot(kExpertsUpBias).defined() || slot(kExpertsDownBias).defined()) {
      expert_ = flat.index_select(0, order_);
    }
    if (counting()) bounds = at::empty({E_ + 1}, flat.options());
    if (!bounds.defined()) bounds = at::tensor(first, flat.options());
    return add_grouped(first, bounds, most, grouped);
  }
  for (int64_t e = 0; e < E_; ++e) add_groups(e, first[e], first[e + 1], most);
}

// A grouped product wants rows and columns of a multiple of 16 bytes, and takes bfloat16 elsewhere
// than in a loop of its own. Of weights that it cannot read where they lie, and of gradients of
// weights, few experts' are there beside the stacks at once.
int64_t Experts::most_grouped() const {
  if (!groups_products(slot(kExpertsX), P_) || E_ < kFewExperts || need(kExpertsUpBias) ||
      need(kExpertsDownBias))
    return 0;
  int64_t beside = 0;
  for (int i = kExpertsUp; i < kExpertsGrads; ++i) {
    if (!slot(i).defined() || i == kExpertsUpBias || i == kExpertsDownBias) continue;
    const auto [rows, columns] = matrix_sizes(i);
    if (rows % 8 != 0 || columns % 8 != 0 || !lies_at(slot(i), 16)) return 0;
    const bool read =
        spec_.form(i).empty() && slot(i).scalar_type() == P_ && slot(i).is_contiguous();
    if (!read || need(i)) beside += rows * columns * int64_t(c10::elementSize(P_));
  }
  const int64_t most = beside == 0 ? E_ : kBytesBeside / beside;
  return most < kFewExperts ? 0 : std::min(most, E_);
}

void Experts::add_grouped(const std::vector<int64_t>& first, const Tensor& bounds, int64_t most,
                          int64_t experts) {
  const int64_t rows = std::max(kGroupedRows, most);
  if (counting()) {  // as many at once as there may be, whatever the ids will be
    for (int64_t row = 0; row < first[E_]; row += rows) {
      const Tensor ends = at::empty({experts}, bounds.options().dtype(at::kInt));
      groups_.push_back({0, row, std::min(rows, first[E_] - row), true, true, experts, ends});
    }
    return;
  }
  const auto several = [&](int64_t e, int64_t count) {
    const Tensor ends = bounds.narrow(0, e + 1, count).sub(first[e]).to(at::kInt);
    groups_.push_back({e, first[e], first[e + count] - first[e], true, true, count, ends});
  };
  for (int64_t e = 0; e < E_;) {
    int64_t end = e + 1, used = first[end] > first[e];
    while (end < E_ && end - e < experts && first[end + 1] - first[e] <= rows) {
      used += first[end + 1] > first[end];
      ++end;
    }
    if (used > 1) {
      several(e, end - e);
    } else {
      for (int64_t each = e; each < end; ++each) {
        add_groups(each, first[each], first[each + 1], most);
      }
    }
    e = end;
  }
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
