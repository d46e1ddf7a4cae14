// LoRA on the products of experts: A and B of each one's own, on its own rows.
#include "ops/torch.h"

#include "block/adapters_aten.h"
#include "experts/experts.h"
#include "math/dropout.h"
#include "ops/checks.h"
#include "ops/ledger.h"

namespace ckptfused {

using at::Tensor;

namespace {

// t *= factor, of which a CPU makes tensors: in double, and in t's type.
void scale(Tensor t, double factor) {
  if (counting() && on_cpu(t)) {
    at::empty({int64_t(sizeof factor + t.element_size())}, t.options().dtype(at::kByte));
  }
  t.mul_(factor);
}

}  // namespace

// The mask's rows are those of all choices sorted by expert: the ids say them again in backward.
void Experts::drop(int a, const Tensor& out, const Tensor& rows, const Group& group) const {
  const int64_t site = kFirstAdapterSite + (a == kExpertsUpA ? 0 : 1);
  const Adapter adapter{{}, {}, {}, /*scale=*/1, dropout(a), site};
  const AdapterPlace place{group.first, 0, rows.size(1), {}, tensors_.rng};
  ckptfused::drop(out, rows, open_gate(rows, P_, rows.size(1)), "reglu", adapter, place, 0);
}

Tensor Experts::dropped(int a, const Tensor& rows, const Group& group) const {
  if (!rows.defined() || !slot(a).defined() || dropout(a) == 0) return rows;
  const Tensor out = empty(rows.sizes(), P_);
  drop(a, out, rows, group);
  return out;
}

Tensor Experts::low_rank(int a, const Tensor& dropped, const Group& group) {
  const Tensor low = empty({group.count, slot(a).size(1)}, P_);
  multiply(a, low, dropped, group, /*back=*/false, /*add=*/false);
  scale(low, a == kExpertsUpA ? spec_.up_scale : spec_.down_scale);
  return low;
}

void Experts::add_adapter(int a, const Tensor& in, const Group& group, const Tensor& out) {
  if (!slot(a).defined()) return;
  const Tensor low = low_rank(a, dropped(a, in, group), group);
  multiply(a + 1, out, low, group, /*back=*/false, /*add=*/true);
}

void Experts::adapter_backward(int a, const Tensor& in, const Tensor& dout, const Group& group,
                               const Tensor& din) {
  const int b = a + 1;
  const bool with_in = grads_[a].defined() || grads_[b].defined();
  const Tensor rows = with_in ? dropped(a, in, group) : Tensor();
  if (grads_[b].defined()) add_product(b, dout.t(), low_rank(a, rows, group), group);
  if (!slot(a).defined() || !(din.defined() || grads_[a].defined())) return;
  const Tensor dlow = empty({group.count, slot(a).size(1)}, P_);
  multiply(b, dlow, dout, group, /*back=*/true, /*add=*/false);
  scale(dlow, a == kExpertsUpA ? spec_.up_scale : spec_.down_scale);
  if (grads_[a].defined()) add_product(a, dlow.t(), rows, group);
  if (!din.defined()) return;
  if (dropout(a) == 0) return multiply(a, din, dlow, group, /*back=*/true, /*add=*/true);
  const Tensor through = empty(din.sizes(), P_);
  multiply(a, through, dlow, group, /*back=*/true, /*add=*/false);
  drop(a, through, through, group);
  Tensor(din).add_(through);
}

}  // namespace ckptfused
