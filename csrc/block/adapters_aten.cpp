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
// Bytes that the copy of dropped rows takes, of rows that are multiplied in half precision.
constexpr int64_t kDropped = int64_t(128) << 20;

// out = drop(t), which may be t. Dropout alone is a gated unit whose gate is open: reglu(1, t) = t;
// "kept" leaves out the scale.
void drop(const Tensor& out, const Tensor& t, const Tensor& gate, std::string_view act,
          const Adapter& adapter, const AdapterPlace& place, int64_t row) {
  if (adapter.p == 0) return;
  call::activation_fwd(gate.expand_as(t), t, place.rng, out, act, adapter.p, adapter.site,
                       place.cols, place.row0 + row, place.col0, place.rows);
}

Tensor open_gate(const Tensor& like, at::ScalarType type, int64_t width) {
  return at::empty({1, width}, like.options().dtype(type)).fill_(1);
}

// out = scale · a @ b, or out += it, of operands of one type; out has it too, and is rounded once,
// or is float32 where they are of half precision. The CPU has no such products, and makes them of
// float32 copies. Of meta tensors PyTorch's is a score of ops in Python, which no device runs.
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

// in @ (high + rest)^T in float32.
Tensor low_rank(const Tensor& in, const Tensor& high, const Tensor& rest) {
  const Tensor t = at::empty({in.size(0), high.size(0)}, in.options().dtype(at::kFloat));
  scaled_product(t, in, high.t(), 1, false);
  if (rest.defined()) scaled_product(t, in, rest.t(), 1, true);
  return t;
}

// rest = t - high, rounded to its type.
void subtract(const Tensor& rest, const Tensor& t, const Tensor& high) {
  if (on_cpu(t)) {  // what its sub_out does within itself
    rest.copy_(t.sub(high.to(t.scalar_type())));
  } else if (!counted_launch("aten::sub", int64_t(t.nbytes() + high.nbytes() + rest.nbytes()))) {
    at::sub_out(const_cast<Tensor&>(rest), t, high);
  }
}

// What is multiplied again, in halves: t [n, r] rounded, the rest of it, and t rounded once more.
struct Halves {
  Tensor all, high, rest;
  Halves(const Tensor& t, at::ScalarType type) {
    const int64_t n = t.size(0), r = t.size(1);
    all = at::empty({n, 3 * r}, t.options().dtype(type));
    high = all.narrow(1, 0, r);
    rest = all.narrow(1, r, r);
    all.as_strided({n, 2, r}, {3 * r, 2 * r, 1}).copy_(t.unsqueeze(1).expand({n, 2, r}));
    subtract(rest, t, high);
  }
};

// out = scale · t @ (high + rest), or out += it, but for the product of both rests: in one product,
// rounded once.
void multiply_wide(const Tensor& out, const Halves& t, const Tensor& high, const Tensor& rest,
                   double scale, bool onto) {
  std::vector<Tensor> pieces{high, high};
  if (rest.defined()) pieces.push_back(rest);
  const Tensor all = at::cat(pieces);
  scaled_product(out, t.all.narrow(1, 0, all.size(0)), all, scale, onto);
}

Tensor transposed(const Tensor& t) {
  return t.defined() ? t.t() : t;
}

// An adapter in halves on blocks of rows, in one where nothing is dropped. What is dropped of are
// numbers of half precision, whose scale waits for the products: they stay as they are.
class HalfRows {
 public:
  HalfRows(const Adapter& adapter, const AdapterPlace& place, const Tensor& like, int64_t width)
      : adapter_(adapter), place_(place), scale_(adapter.scale) {
    if (adapter.p == 0) return;
    scale_ *= make_dropout(adapter.p, int(adapter.site), place.cols).scale;
    gate_ = open_gate(like, like.scalar_type(), width);
    rows_ = std::max<int64_t>(1, kDropped / std::max<int64_t>(1, width * like.element_size()));
  }

  void forward(const Tensor& y, const Tensor& in) const {
    for_blocks(y, [&](int64_t row, const Tensor& out) {
      const Tensor x = kept(in.narrow(0, row, out.size(0)), row);
      const Halves t(low_rank(x, adapter_.a, adapter_.a_rest), y.scalar_type());
      multiply_wide(out, t, adapter_.b.t(), transposed(adapter_.b_rest), scale_, true);
    });
  }

  void backward(const Tensor& dy, const Tensor& in, const Tensor& din) const {
    const bool with_in = adapter_.da.defined() || adapter_.db.defined();
    for_blocks(dy, [&](int64_t row, const Tensor& d) {
      const Tensor x = with_in ? kept(in.narrow(0, row, d.size(0)), row) : Tensor();
      if (adapter_.db.defined()) {
        const Halves t(low_rank(x, adapter_.a, adapter_.a_rest), dy.scalar_type());
        scaled_product(adapter_.db, d.t(), t.high, scale_, true);
        scaled_product(adapter_.db, d.t(), t.rest, scale_, true);
      }
      if (!adapter_.da.defined() && !din.defined()) return;
      const Halves dt(low_rank(d, adapter_.b.t(), transposed(adapter_.b_rest)), dy.scalar_type());
      if (adapter_.da.defined()) {
        scaled_product(adapter_.da, dt.high.t(), x, scale_, true);
        scaled_product(adapter_.da, dt.rest.t(), x, scale_, true);
      }
      if (din.defined()) add_input_grad(din.narrow(0, row, d.size(0)), dt, x, row);
    });
  }

 private:
  template <typename F>
  void for_blocks(const Tensor& t, F f) const {
    const int64_t n = t.size(0), step = rows_ > 0 ? rows_ : std::max<int64_t>(1, n);
    for (int64_t row = 0; row < n; row += step) {
      f(row, t.narrow(0, row, std::min(step, n - row)));
    }
  }

  // What dropout keeps of rows, in a copy.
  Tensor kept(const Tensor& rows, int64_t row) const {
    if (adapter_.p == 0) return rows;
    const Tensor out = at::empty(rows.sizes(), rows.options());
    drop(out, rows, gate_, kKept, adapter_, place_, row);
    return out;
  }

  // x: the kept rows, whose memory is free by now, or undefined.
  void add_input_grad(const Tensor& din, const Halves& dt, const Tensor& x, int64_t row) const {
    if (adapter_.p == 0) {
      return multiply_wide(din, dt, adapter_.a, adapter_.a_rest, scale_, true);
    }
    const Tensor dx = x.defined() ? x : at::empty(din.sizes(), dt.all.options());
    multiply_wide(dx, dt, adapter_.a, adapter_.a_rest, scale_, false);
    drop(dx, dx, gate_, kKept, adapter_, place_, row);
    Tensor(din).add_(dx);
  }

  const Adapter& adapter_;
  const AdapterPlace& place_;
  double scale_;
  Tensor gate_;
  int64_t rows_ = 0;  // 0: all
};

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

void split_into(const Tensor& t, const Tensor& high, const Tensor& rest) {
  high.copy_(t);
  subtract(rest, t, high);
}

void adapters_fwd_aten(const Tensor& y, const Tensor& in, const Adapters& adapters,
                       const AdapterPlace& place) {
  if (adapters.empty()) return;
  if (adapters[0].halves) return HalfRows(adapters[0], place, y, in.size(1)).forward(y, in);
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
  if (adapters[0].halves) return HalfRows(adapters[0], place, dy, width).backward(dy, in, din);
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
