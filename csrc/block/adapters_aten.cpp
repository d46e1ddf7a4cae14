#include "ops/torch.h"

#include "block/adapters_aten.h"
#include "block/ops.h"
#include "math/dropout.h"
#include "ops/activation.h"
#include "ops/checks.h"
#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

// Enough rows for a GPU to be busy; their wide copies are a few tens of MiB.
constexpr int64_t kRows = 4096;

// What the blocks of rows have in common, in the type of the arithmetic.
struct Wide {
  at::ScalarType type;
  std::vector<Tensor> a, b;
  Tensor gate;  // of `drop`

  Wide(const Adapters& adapters, const Tensor& y, int64_t width)
      : type(acc_dtype(y.scalar_type())) {
    bool drops = false;
    for (const Adapter& adapter : adapters) {
      a.push_back(adapter.a.to(type));
      b.push_back(adapter.b.to(type));
      drops |= adapter.p > 0;
    }
    if (drops) gate = open_gate(y, type, width);
  }

  // The rows in this type, in a copy where the adapter drops of them.
  Tensor dropped(const Tensor& rows, const Adapter& adapter, const AdapterPlace& place,
                 int64_t row) const {
    const Tensor wide = rows.to(type, /*non_blocking=*/false, /*copy=*/adapter.p > 0);
    drop(wide, wide, gate, "reglu", adapter, place, row);
    return wide;
  }

  Tensor scaled(const Tensor& left, const Tensor& right, double scale) const {
    const Tensor out = at::empty({left.size(0), right.size(1)}, left.options());
    scaled_product(out, left, right, scale, false);
    return out;
  }
};

// Calls f(row, rows) for the blocks of n rows.
template <typename F>
void for_blocks(int64_t n, F f) {
  for (int64_t row = 0; row < n; row += kRows) f(row, std::min(kRows, n - row));
}

}  // namespace

// Dropout alone is a gated unit whose gate is open: reglu(1, t) = t; "kept" leaves out the scale.
void drop(const Tensor& out, const Tensor& t, const Tensor& gate, std::string_view act,
          const Adapter& adapter, const AdapterPlace& place, int64_t row) {
  if (adapter.p == 0) return;
  call::activation_fwd(gate.expand_as(t), t, place.rng, out, act, adapter.p, adapter.site,
                       place.cols, place.row0 + row, place.col0, place.rows);
}

Tensor open_gate(const Tensor& like, at::ScalarType type, int64_t width) {
  return at::empty({1, width}, like.options().dtype(type)).fill_(1);
}

// The CPU has no such products, and makes them of float32 copies. Of meta tensors PyTorch's is a
// score of ops in Python, which no device runs.
void scaled_product(const Tensor& out, const Tensor& a, const Tensor& b, double scale, bool onto) {
  const auto operand = [&](const Tensor& t) {
    return on_cpu(out) ? t.to(acc_dtype(t.scalar_type())) : t;
  };
  Tensor sum = operand(out);
  const Tensor left = operand(a), right = operand(b);
  if (counting()) {
    const int64_t written = (onto ? 2 : 1) * int64_t(out.nbytes());
    counted_launch("aten::addmm", int64_t(a.nbytes() + b.nbytes()) + written);
  } else if (sum.scalar_type() == left.scalar_type()) {
    at::addmm_out(sum, sum, left, right, onto ? 1 : 0, scale);
  } else {
    at::addmm_out(sum, sum, left, right, at::kFloat, onto ? 1 : 0, scale);
  }
  if (!sum.is_same(out)) out.copy_(sum);
}

void adapters_fwd_aten(const Tensor& y, const Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place) {
  if (adapters.empty()) return;
  if (adapters[0].halves) return adapters_fwd_halves(y, in, adapters, place);
  const Wide wide(adapters, y, in.size(1));
  for_blocks(y.size(0), [&](int64_t row, int64_t rows) {
    Tensor sum;
    for (size_t i = 0; i < adapters.size(); ++i) {
      const Adapter& adapter = adapters[i];
      const Tensor x = wide.dropped(in.narrow(0, row, rows), adapter, place, row);
      const Tensor t = at::mm(x, wide.a[i].t());
      if (!sum.defined()) {
        sum = wide.scaled(t, wide.b[i].t(), adapter.scale);
      } else {
        scaled_product(sum, t, wide.b[i].t(), adapter.scale, true);
      }
      if (adapter.bias.defined()) sum.add_(adapter.bias.to(wide.type), adapter.scale);
    }
    Tensor out = y.narrow(0, row, rows);
    out.add_(sum);
  });
}

void adapters_bwd_aten(const Tensor& dy, const Tensor& in, const Tensor& din,
                       const Adapters& adapters, const AdapterPlace& place) {
  if (adapters.empty()) return;
  const int64_t width = (in.defined() ? in : din).size(1);
  if (adapters[0].halves) return adapters_bwd_halves(dy, in, din, adapters, place);
  const Wide wide(adapters, dy, width);
  for_blocks(dy.size(0), [&](int64_t row, int64_t rows) {
    const Tensor d = dy.narrow(0, row, rows).to(wide.type);
    for (size_t i = 0; i < adapters.size(); ++i) {
      const Adapter& adapter = adapters[i];
      Tensor dbias = adapter.dbias, x, dt;
      if (adapter.da.defined() || adapter.db.defined()) {
        x = wide.dropped(in.narrow(0, row, rows), adapter, place, row);
      }
      if (adapter.db.defined()) {
        scaled_product(adapter.db, d.t(), at::mm(x, wide.a[i].t()), adapter.scale, true);
      }
      if (dbias.defined()) dbias.add_(d.sum(0), adapter.scale);
      if (adapter.da.defined() || din.defined()) dt = wide.scaled(d, wide.b[i], adapter.scale);
      if (adapter.da.defined()) scaled_product(adapter.da, dt.t(), x, 1, true);
      if (!din.defined()) continue;
      const Tensor dx = at::mm(dt, wide.a[i]);
      drop(dx, dx, wide.gate, "reglu", adapter, place, row);
      Tensor to = din.narrow(0, row, rows);
      to.add_(dx);
    }
  });
}

}  // namespace ckptfused
