#include "ops/torch.h"

#include "block/adapters_aten.h"
#include "block/ops.h"
#include "ops/checks.h"
#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

// Enough rows for a GPU to be busy; their wide copies are a few tens of MiB.
constexpr int64_t kRows = 4096;

// t = drop(t), in place. Dropout alone is a gated unit whose gate is open: reglu(1, t) = t.
void drop(const Tensor& t, const Adapter& adapter, const AdapterPlace& place, int64_t row) {
  if (adapter.p == 0) return;
  const Tensor gate = at::empty({1, t.size(1)}, t.options()).fill_(1).expand_as(t);
  call::activation_fwd(gate, t, place.rng, t, "reglu", adapter.p, adapter.site, place.cols,
                       place.row0 + row, place.col0, place.rows);
}

// A copy of the rows in the type of the arithmetic, dropped as the adapter wants it.
Tensor dropped(const Tensor& rows, at::ScalarType type, const Adapter& adapter,
               const AdapterPlace& place, int64_t row) {
  const bool copy = adapter.p > 0;
  const Tensor wide = rows.to(type, /*non_blocking=*/false, copy);
  drop(wide, adapter, place, row);
  return wide;
}

// sum += scale · a @ b. Of meta tensors PyTorch's is a score of ops in Python, which no device
// runs.
void add_product(const Tensor& sum, const Tensor& a, const Tensor& b, double scale) {
  if (Ledger* ledger = Ledger::current()) {
    ledger->launched("aten::addmm_", 1, 2 * int64_t(sum.nbytes()));  // its operands are counted
  } else {
    sum.addmm_(a, b, 1, scale);
  }
}

// Calls f(row, rows) for the blocks of n rows.
template <typename F>
void for_blocks(int64_t n, F f) {
  for (int64_t row = 0; row < n; row += kRows) f(row, std::min(kRows, n - row));
}

}  // namespace

void adapters_fwd_aten(const Tensor& y, const Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place) {
  if (adapters.empty()) return;
  const at::ScalarType type = acc_dtype(y.scalar_type());
  for_blocks(y.size(0), [&](int64_t row, int64_t rows) {
    Tensor sum;
    for (const Adapter& adapter : adapters) {
      const Tensor x = dropped(in.narrow(0, row, rows), type, adapter, place, row);
      const Tensor t = at::mm(x, adapter.a.to(type).t());
      const Tensor b = adapter.b.to(type);
      if (!sum.defined()) {
        sum = at::mm(t, b.t()).mul_(adapter.scale);
      } else {
        add_product(sum, t, b.t(), adapter.scale);
      }
      if (adapter.bias.defined()) sum.add_(adapter.bias.to(type), adapter.scale);
    }
    Tensor out = y.narrow(0, row, rows);
    out.add_(sum);
  });
}

void adapters_bwd_aten(const Tensor& dy, const Tensor& in, const Tensor& din,
                       const Adapters& adapters, const AdapterPlace& place) {
  if (adapters.empty()) return;
  const at::ScalarType type = acc_dtype(dy.scalar_type());
  for_blocks(dy.size(0), [&](int64_t row, int64_t rows) {
    const Tensor d = dy.narrow(0, row, rows).to(type);
    for (const Adapter& adapter : adapters) {
      Tensor da = adapter.da, db = adapter.db, dbias = adapter.dbias;
      const Tensor a = adapter.a.to(type);
      Tensor x, dt;
      if (da.defined() || db.defined()) {
        x = dropped(in.narrow(0, row, rows), type, adapter, place, row);
      }
      if (db.defined()) add_product(db, d.t(), at::mm(x, a.t()), adapter.scale);
      if (dbias.defined()) dbias.add_(d.sum(0), adapter.scale);
      if (da.defined() || din.defined()) {
        dt = at::mm(d, adapter.b.to(type)).mul_(adapter.scale);
      }
      if (da.defined()) add_product(da, dt.t(), x, 1);
      if (!din.defined()) continue;
      const Tensor dx = at::mm(dt, a);
      drop(dx, adapter, place, row);
      Tensor to = din.narrow(0, row, rows);
      to.add_(dx);
    }
  });
}

}  // namespace ckptfused
