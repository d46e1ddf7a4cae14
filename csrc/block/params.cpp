// What every part of a block call uses: its projections and gradients.
#include "ops/torch.h"

#include <algorithm>
#include <array>

#include "block/block.h"
#include "kernels/cpu/pages.h"
#include "ops/checks.h"
#include "ops/column_sums.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

Tensor Block::empty(at::IntArrayRef size, at::ScalarType type, const char* name,
                    int64_t slot) const {
  const Ledger::Name named(name, slot);
  Tensor t = at::empty(size, x_.options().dtype(type));
  if (t.is_cpu()) advise_huge_pages(t.mutable_data_ptr(), t.nbytes());
  return t;
}

Tensor Block::weight(int slot) {
  if (const QuantizedSlots* stored = quantized(slot)) return dequantized(*stored);
  const Tensor& p = params_[slot];
  if (!p.defined() || p.scalar_type() == P_) return p;
  const Ledger::Name name("cast", slot);
  if (!cast_[slot].defined()) cast_[slot] = p.to(P_);
  return cast_[slot];
}

bool Block::need_any(int begin, int end) const {
  for (int slot = begin; slot < end; ++slot) {
    if (need(slot)) return true;
  }
  for (const AdapterSlots& s : adapters_) {
    if (begin <= s.weight && s.weight < end && adapter_trained(s)) return true;
  }
  return false;
}

Tensor Block::grad_vector(int slot) {
  return need(slot) ? weight_grad(slot, A_) : Tensor();
}

Tensor Block::weight_grad(int slot, at::ScalarType type) {
  if (!grads_[slot].defined()) {
    grads_[slot] = empty(params_[slot].sizes(), sums_ ? A_ : type, "d", slot);
    if (sums_) grads_[slot].zero_();
  }
  return grads_[slot];
}

void Block::add_weight_grad(int slot, bool transposed, int64_t row0, int64_t rows, int64_t col0,
                            int64_t cols, const Tensor& dout, const Tensor& in, bool add) {
  if (!need(slot)) return;
  // A sum over row tiles is held in the accumulation type.
  const bool cut_rows = spec_.has_ffn && tiles_.rows < N_ && slot >= ffn_slot(0);
  const Tensor grad = weight_grad(slot, cut_rows ? A_ : P_);
  const Ledger::Name name("d", slot);
  add |= sums_;
  if (transposed) {
    matmul_out(part_of(part_of(grad, 0, col0, cols), 1, row0, rows), in.t(), dout, add);
  } else {
    matmul_out(part_of(part_of(grad, 0, row0, rows), 1, col0, cols), dout.t(), in, add);
  }
}

// The gradients of parts of a tile by one product; false where not all are asked for.
bool Block::add_weight_grads(const std::vector<Part>& parts, bool transposed, const Tensor& dout,
                             const Tensor& in) {
  if (sums_ ||
      !std::all_of(parts.begin(), parts.end(), [&](const Part& p) { return need(p.weight); })) {
    return false;
  }
  const int64_t out_cols = dout.size(1), in_cols = in.size(1);
  const std::vector<int64_t> sizes = transposed ? std::vector<int64_t>{in_cols, out_cols}
                                                : std::vector<int64_t>{out_cols, in_cols};
  const Tensor whole = empty(sizes, P_, "d weights of a tile");
  {
    const Ledger::Name name("d", parts[0].weight);
    transposed ? matmul_out(whole, in.t(), dout, false) : matmul_out(whole, dout.t(), in, false);
  }
  const int64_t dim = transposed ? 1 : 0;
  for (const Part& part : parts) {
    const Tensor grad = weight_grad(part.weight, P_);
    grad.narrow(dim, part.row0, part.width).copy_(whole.narrow(dim, part.col0, part.width));
  }
  return true;
}

void Block::add_bias_grad(int slot, int64_t row0, const Tensor& dout, bool add) {
  const Tensor grad = grad_vector(slot);
  if (!grad.defined()) return;
  const Ledger::Name name("d", slot);
  column_sums_out(part_of(grad, 0, row0, dout.size(1)), dout, add || sums_);
}

Tensor Block::part_weight(const Part& part, bool transposed) {
  return part_of(weight(part.weight), transposed ? 1 : 0, part.row0, part.width);
}

std::optional<Tensor> Block::part_bias(const Part& part) {
  const Tensor b = weight(part.bias);
  return b.defined() ? std::optional<Tensor>(part_of(b, 0, part.row0, part.width)) : std::nullopt;
}

// One after another, so that of stored weights one at a time is there as numbers.
const Joined& Block::join(const Tile& t) {
  if (joined_.weight.defined() || !joined_.tile) return joined_;
  const int64_t dim = spec_.ffn.transposed ? 1 : 0, width = 2 * t.cols;
  const std::vector<Part> parts = gu_parts(t);
  size_t biases = 0;
  for (const Part& part : parts) biases += params_[part.bias].defined();
  // Where only one of two projections has a bias, each keeps to itself.
  if (biases > 0 && biases < parts.size()) return joined_;
  joined_.weight =
      empty(dim == 0 ? std::array{width, C_} : std::array{C_, width}, P_, "weights of a tile");
  if (biases > 0) joined_.bias = empty({width}, P_, "biases of a tile");
  for (const Part& part : parts) {
    joined_.weight.narrow(dim, part.col0, part.width)
        .copy_(part_weight(part, spec_.ffn.transposed));
    if (biases > 0) joined_.bias.narrow(0, part.col0, part.width).copy_(*part_bias(part));
  }
  return joined_;
}

void Block::project(const char* name, const Tensor& out, const Tensor& in,
                    const std::vector<Part>& parts, bool transposed, int64_t row0,
                    const Joined& joined) {
  const Ledger::Name named(name);
  if (joined.weight.defined())
    linear_out(out, in, joined.weight, call::opt(joined.bias), transposed);
  for (const Part& part : parts) {
    const Tensor columns = part_of(out, 1, part.col0, part.width);
    if (!joined.weight.defined()) {
      linear_out(columns, in, part_weight(part, transposed), part_bias(part), transposed);
    }
    add_adapters(columns, in, part, row0);
  }
}

void Block::project_backward(const Tensor& dout, const Tensor& in, const std::vector<Part>& parts,
                             bool transposed, const Tensor& din, bool add_params, bool add_din,
                             int64_t row0, const Joined& joined) {
  const auto input_grad = [&](const Tensor& d, const Tensor& w, int slot) {
    const Ledger::Name name("d in of", slot);
    matmul_out(din, d, transposed ? w.t() : w, add_din);
    add_din = true;
  };
  const bool one_input = din.defined() && joined.weight.defined();
  if (one_input) input_grad(dout, joined.weight, parts[0].weight);
  const bool one_weight = joined.tile && add_weight_grads(parts, transposed, dout, in);
  for (const Part& part : parts) {
    const Tensor d = part_of(dout, 1, part.col0, part.width);
    if (din.defined() && !one_input) input_grad(d, part_weight(part, transposed), part.weight);
    if (need(part.weight) && !one_weight) {
      add_weight_grad(part.weight, transposed, part.row0, part.width, 0, in.size(1), d, in,
                      add_params);
    }
    add_bias_grad(part.bias, part.row0, d, add_params);
    if (in.defined() || din.defined()) {
      adapters_backward(d, in, part, din, row0, 0, (in.defined() ? in : din).size(1));
    }
  }
}

}  // namespace ckptfused
