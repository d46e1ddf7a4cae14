// Adapters of half-precision products: what is `rank` wide and multiplied again is two halves.
#include "ops/torch.h"

#include <ATen/ScalarOps.h>

#include <algorithm>
#include <cmath>

#include "block/adapters_aten.h"
#include "math/dropout.h"
#include "ops/activation.h"
#include "ops/checks.h"
#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

// What the rest of a number in halves is multiplied by, so that it has the number's own exponent in
// float16, whose least step is 2^-24: as it is, nothing would be left of that of a number of 2^-13.
constexpr double rest_scale(at::ScalarType type) {
  return type == at::kHalf ? 2048 : 1;
}

// What low-rank values are divided by meanwhile: sums of float16's products may be beyond float16.
constexpr double headroom(at::ScalarType type) {
  return type == at::kHalf ? 8 : 1;
}

// Bytes that the copy of dropped rows takes, of rows that are multiplied in half precision.
constexpr int64_t kDropped = int64_t(128) << 20;

// in @ (high + rest / rest_scale)^T in float32, times the rests' scale, by the headroom.
Tensor low_rank(const Tensor& in, const Tensor& high, const Tensor& rest) {
  const Tensor t = at::empty({in.size(0), high.size(0)}, in.options().dtype(at::kFloat));
  const double room = headroom(in.scalar_type());
  scaled_product(t, in, high.t(), rest_scale(in.scalar_type()) / room, false);
  if (rest.defined()) scaled_product(t, in, rest.t(), 1 / room, true);
  return t;
}

// out = t · scale, rounded to its type.
void scale_into(const Tensor& out, const Tensor& t, double scale) {
  if (on_cpu(t)) {  // what its mul_out does within itself
    out.copy_(t.mul(scale));
  } else if (!counted_launch("aten::mul", int64_t(t.nbytes() + out.nbytes()))) {
    at::mul_out(const_cast<Tensor&>(out), t, at::native::wrapped_scalar_tensor(scale));
  }
}

Tensor times(const Tensor& t, double scale) {
  if (scale == 1) return t;
  const Tensor out = at::empty(t.sizes(), t.options());
  scale_into(out, t, scale);
  return out;
}

// rest = scaled - high · rest_scale, rounded to its type.
void subtract(const Tensor& rest, const Tensor& scaled, const Tensor& high) {
  const double scale = rest_scale(rest.scalar_type());
  if (on_cpu(scaled)) {  // what its sub_out does within itself
    rest.copy_(scaled.sub(high.to(scaled.scalar_type()), scale));
  } else if (!counted_launch("aten::sub",
                             int64_t(scaled.nbytes() + high.nbytes() + rest.nbytes()))) {
    at::sub_out(const_cast<Tensor&>(rest), scaled, high, scale);
  }
}

// What is multiplied again, in halves: t [n, r] rounded, the rest of it, and t rounded once more,
// for the other side's rest, whose scale it is without. All by the headroom. scaled: t times the
// rests' scale, by the headroom.
struct Halves {
  Tensor all, high, rest;
  Halves(const Tensor& scaled, at::ScalarType type) {
    const int64_t n = scaled.size(0), r = scaled.size(1);
    const double scale = rest_scale(type);
    all = at::empty({n, 3 * r}, scaled.options().dtype(type));
    high = all.narrow(1, 0, r);
    rest = all.narrow(1, r, r);
    if (scale == 1) {
      all.as_strided({n, 2, r}, {3 * r, 2 * r, 1}).copy_(scaled.unsqueeze(1).expand({n, 2, r}));
    } else {
      scale_into(high, scaled, 1 / scale);
      scale_into(all.narrow(1, 2 * r, r), scaled, 1 / (scale * scale));
    }
    subtract(rest, scaled, high);
  }
};

// out = scale · t @ (high + rest / rest_scale), or out += it, but for the product of both rests: in
// one product, rounded once.
void multiply_wide(const Tensor& out, const Halves& t, const Tensor& high, const Tensor& rest,
                   double scale, bool onto) {
  std::vector<Tensor> pieces{high, times(high, 1 / rest_scale(high.scalar_type()))};
  if (rest.defined()) pieces.push_back(rest);
  const Tensor all = at::cat(pieces);
  const double room = headroom(high.scalar_type());
  scaled_product(out, t.all.narrow(1, 0, all.size(0)), all, scale * room, onto);
}

Tensor transposed(const Tensor& t) {
  return t.defined() ? t.t() : t;
}

// Adapters in halves on blocks of rows, in one where nothing is dropped. What is dropped of are
// numbers of half precision, whose scale waits for the products: they stay as they are.
class HalfRows {
 public:
  HalfRows(const Adapters& adapters, const AdapterPlace& place, const Tensor& like, int64_t width)
      : adapters_(adapters), place_(place), type_(like.scalar_type()) {
    const auto drops = [](const Adapter& adapter) { return adapter.p > 0; };
    if (std::none_of(adapters.begin(), adapters.end(), drops)) return;
    gate_ = open_gate(like, type_, width);
    rows_ = std::max<int64_t>(1, kDropped / std::max<int64_t>(1, width * like.element_size()));
  }

  void forward(const Tensor& y, const Tensor& in) const {
    const Adapter& first = adapters_[0];
    const bool alone = adapters_.size() == 1 && !first.bias.defined();
    for_blocks(y, [&](int64_t row, const Tensor& out) {
      const Tensor rows = in.narrow(0, row, out.size(0));
      if (!alone) return add_all(out, rows, row);
      const Halves t(low_rank(kept(rows, first, row), first.a, first.a_rest), type_);
      multiply_wide(out, t, first.b.t(), transposed(first.b_rest), scale(first), true);
    });
  }

  void backward(const Tensor& dy, const Tensor& in, const Tensor& din) const {
    for_blocks(dy, [&](int64_t row, const Tensor& d) {
      const auto rows = [&](const Tensor& t) {
        return t.defined() ? t.narrow(0, row, d.size(0)) : t;
      };
      for (const Adapter& adapter : adapters_) backward(adapter, d, rows(in), rows(din), row);
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

  double scale(const Adapter& adapter) const {
    if (adapter.p == 0) return adapter.scale;
    return adapter.scale * make_dropout(adapter.p, int(adapter.site), place_.cols).scale;
  }

  // What dropout keeps of rows, in a copy.
  Tensor kept(const Tensor& rows, const Adapter& adapter, int64_t row) const {
    if (adapter.p == 0) return rows;
    const Tensor out = at::empty(rows.sizes(), rows.options());
    drop(out, rows, gate_, kKept, adapter, place_, row);
    return out;
  }

  // All of them in one product, so that y is rounded once: a bias is one more row of b, times its
  // scale. The product has the largest scale, so that no number is beyond what it is in y or in t.
  void add_all(const Tensor& out, const Tensor& rows, int64_t row) const {
    double most = 0;
    for (const Adapter& adapter : adapters_) most = std::max(most, std::abs(scale(adapter)));
    if (most == 0) most = 1;
    std::vector<Tensor> low, high, rest;
    bool any_rest = false;
    const auto add = [&](const Tensor& t, const Tensor& b, const Tensor& b_rest) {
      low.push_back(t);
      high.push_back(b);
      rest.push_back(b_rest.defined() ? b_rest : at::zeros_like(b));
      any_rest |= b_rest.defined();
    };
    for (const Adapter& adapter : adapters_) {
      const Tensor t = low_rank(kept(rows, adapter, row), adapter.a, adapter.a_rest);
      add(t.mul_(scale(adapter) / most), adapter.b.t(), transposed(adapter.b_rest));
      if (!adapter.bias.defined()) continue;
      const Tensor wide = at::empty({1, out.size(1)}, t.options());
      wide.copy_(adapter.bias).mul_(adapter.scale);
      const Tensor bias = at::empty(wide.sizes(), out.options()), left = at::empty_like(bias);
      split_into(wide, bias, left);
      const double one = rest_scale(type_) / headroom(type_) / most;
      add(at::full({rows.size(0), 1}, one, t.options()), bias, left);
    }
    multiply_wide(out, Halves(at::cat(low, 1), type_), at::cat(high),
                  any_rest ? at::cat(rest) : Tensor(), most, true);
  }

  void backward(const Adapter& adapter, const Tensor& d, const Tensor& in, const Tensor& din,
                int64_t row) const {
    const double scaled = scale(adapter) * headroom(type_);
    const bool with_in = adapter.da.defined() || adapter.db.defined();
    const Tensor x = with_in ? kept(in, adapter, row) : Tensor();
    if (adapter.db.defined()) {
      const Halves t(low_rank(x, adapter.a, adapter.a_rest), type_);
      scaled_product(adapter.db, d.t(), t.high, scaled, true);
      scaled_product(adapter.db, d.t(), t.rest, scaled / rest_scale(type_), true);
    }
    if (adapter.dbias.defined())
      Tensor(adapter.dbias).add_(d.sum(0, false, at::kFloat), adapter.scale);
    if (!adapter.da.defined() && !din.defined()) return;
    const Halves dt(low_rank(d, adapter.b.t(), transposed(adapter.b_rest)), type_);
    if (adapter.da.defined()) {
      scaled_product(adapter.da, dt.high.t(), x, scaled, true);
      scaled_product(adapter.da, dt.rest.t(), x, scaled / rest_scale(type_), true);
    }
    if (din.defined()) add_input_grad(adapter, din, dt, x, row);
  }

  // x: the kept rows, whose memory is free by now, or undefined.
  void add_input_grad(const Adapter& adapter, const Tensor& din, const Halves& dt, const Tensor& x,
                      int64_t row) const {
    if (adapter.p == 0) {
      return multiply_wide(din, dt, adapter.a, adapter.a_rest, scale(adapter), true);
    }
    const Tensor dx = x.defined() ? x : at::empty(din.sizes(), dt.all.options());
    multiply_wide(dx, dt, adapter.a, adapter.a_rest, scale(adapter), false);
    drop(dx, dx, gate_, kKept, adapter, place_, row);
    Tensor(din).add_(dx);
  }

  const Adapters& adapters_;
  const AdapterPlace& place_;
  at::ScalarType type_;
  Tensor gate_;
  int64_t rows_ = 0;  // 0: all
};

}  // namespace

void split_into(const Tensor& t, const Tensor& high, const Tensor& rest) {
  high.copy_(t);
  subtract(rest, times(t, rest_scale(high.scalar_type())), high);
}

void adapters_fwd_halves(const Tensor& y, const Tensor& in, const Adapters& adapters,
                         const AdapterPlace& place) {
  HalfRows(adapters, place, y, in.size(1)).forward(y, in);
}

void adapters_bwd_halves(const Tensor& dy, const Tensor& in, const Tensor& din,
                         const Adapters& adapters, const AdapterPlace& place) {
  HalfRows(adapters, place, dy, (in.defined() ? in : din).size(1)).backward(dy, in, din);
}

}  // namespace ckptfused
