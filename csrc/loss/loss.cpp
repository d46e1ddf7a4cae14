// The loss head: logits a piece at a time, their loss and their gradient in their place.
#include "ops/torch.h"

#include "loss/loss.h"

#include "block/adapters_aten.h"
#include "loss/loss_pieces.h"
#include "loss/reduction.h"
#include "math/dropout.h"
#include "ops/checks.h"
#include "ops/column_sums.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kOp = "linear_cross_entropy";

Tensor in_type(const Tensor& t, at::ScalarType type) {
  return t.defined() ? t.to(type) : t;
}

}  // namespace

int64_t LossHead::row_step(bool sums) const {
  const int64_t held = sums && tensors_.weight.element_size() < 4 ? V_ * C_ * 4 : 0;
  return loss_piece(N_, row_stride(V_) * logit_size(), scratch(V_), 16, held);
}

int64_t LossHead::col_step(bool sums) const {
  const int64_t held = sums && logit_size() < 4 ? N_ * C_ * 4 : 0;
  return loss_piece(V_, N_ * logit_size(), scratch(N_), 64, held);
}

int64_t LossHead::scratch(int64_t logits_each) const {
  if (spec_.scratch > 0) return spec_.scratch;
  return default_loss_scratch(logits_each * logit_size(), C_, !on_cpu(x_));
}

LossHead::LossHead(const LossSpec& spec, const LossTensors& tensors, const std::vector<bool>& needs)
    : spec_(spec), tensors_(tensors), needs_(needs) {
  const Tensor &x = tensors.x, &weight = tensors.weight;
  const auto check = [&](const char* name, const Tensor& t, at::IntArrayRef sizes) {
    if (!t.defined()) return;
    TORCH_CHECK(t.sizes() == sizes && t.device() == x.device() && t.is_floating_point(), kOp, ": ",
                name, ": expected floating-point ", sizes, " on ", x.device(), ", got ",
                t.scalar_type(), " ", t.sizes(), " on ", t.device());
    check_memory(kOp, name, t);
  };
  const bool stored = !spec.quant.empty();
  TORCH_CHECK(x.dim() >= 1 && (stored || weight.dim() == 2), kOp,
              ": expected x [..., C] and weight [V, C], got ", x.sizes(), " and ", weight.sizes());
  C_ = x.size(-1);
  V_ = stored ? spec.classes : weight.size(0);
  N_ = tensors.target.numel();
  check("x", x, x.sizes());
  if (!stored) check("weight", weight, {V_, C_});
  check("bias", tensors.bias, {V_});
  check("class_weight", tensors.class_weight, {V_});
  TORCH_CHECK(tensors.target.sizes() == x.sizes().slice(0, x.dim() - 1) &&
                  tensors.target.scalar_type() == at::kLong &&
                  tensors.target.device() == x.device(),
              kOp, ": target: expected int64 ", x.sizes().slice(0, x.dim() - 1), " on ", x.device(),
              ", got ", tensors.target.scalar_type(), " ", tensors.target.sizes(), " on ",
              tensors.target.device());
  check_memory(kOp, "target", tensors.target);
  const size_t beside = kAdapterParams * spec.lora.size();
  const size_t expected = kLossAdapters + beside + kQuantParams * spec.quant.size();
  TORCH_CHECK(kLossAdapters + tensors.adapters.size() == expected && needs.size() == expected, kOp,
              ": the spec has ", spec.lora.size(), " adapters and ", spec.quant.size(),
              " weights in few bits, got ", tensors.adapters.size(), " tensors of these and ",
              needs.size(), " needs");
  for (size_t i = 0; i < spec.lora.size(); ++i) {
    const Tensor* t = &tensors.adapters[kAdapterParams * i];
    TORCH_CHECK(t[0].defined() && t[1].defined(), kOp, ": expected a and b of each adapter");
    check("a", t[0], {spec.lora[i].rank, C_});
    check("b", t[1], {V_, spec.lora[i].rank});
    check("bias of an adapter", t[2], {V_});
  }
  A_ = acc_dtype(x.scalar_type());
  P_ = spec.compute == at::ScalarType::Undefined ? x.scalar_type() : spec.compute;
  x_ = x.contiguous().view({N_, C_});
  target_sizes_ = tensors.target.sizes().vec();
  tensors_.target = tensors.target.contiguous().view({N_});
  weight_ = stored ? numbers({tensors.adapters.begin() + beside, tensors.adapters.end()})
                   : in_type(weight, P_);
  bias_ = in_type(tensors.bias, P_);
  if (tensors.class_weight.defined()) {
    const Tensor w = tensors.class_weight.to(A_);
    class_weight_ = at::cat({w, w.sum().view({1})});
  }
  sums_.resize(needs.size());
}

// The numbers of a weight in few bits, which are there until the pass ends.
Tensor LossHead::numbers(const std::vector<Tensor>& beside) const {
  const Tensor& codes = tensors_.weight;
  TORCH_CHECK(!needs_[kLossWeight], kOp, ": a weight in few bits cannot be trained");
  OptTensorList state;
  for (const Tensor& t : beside) state.push_back(call::opt(t));
  const Ledger::Name name("weight of head");
  const Tensor made = call::dequantize(codes, state, spec_.quant[0].form, {V_, C_}, P_);
  counted_launch("dequantize", int64_t(codes.nbytes() + made.nbytes()));
  return made;
}

call::LossArgs LossHead::args() const {
  return {spec_.ignore_index, spec_.label_smoothing, spec_.logit_scale, spec_.softcap,
          spec_.z_loss};
}

Tensor LossHead::logits_buffer(int64_t rows, int64_t cols) const {
  const Ledger::Name name("logits");
  return empty({rows * row_stride(cols)}, P_);
}

// On a GPU rows begin at multiples of 16 bytes: an odd vocabulary's, too, are read so many at once.
int64_t LossHead::row_stride(int64_t cols) const {
  return on_cpu(x_) ? cols : round_up(cols, 16 / logit_size());
}

// The first of a buffer's logits as a matrix.
Tensor LossHead::matrix(const Tensor& buffer, int64_t rows, int64_t cols) const {
  return buffer.as_strided({rows, cols}, {row_stride(cols), 1});
}

// The adapters on classes [col0, col0 + cols).
Adapters LossHead::adapters(int64_t col0, int64_t cols, bool gradients) {
  Adapters list;
  for (size_t i = 0; i < spec_.lora.size(); ++i) {
    const int slot = int(kAdapterParams * i);
    const auto rows = [&](const Tensor& t) { return t.defined() ? part_of(t, 0, col0, cols) : t; };
    // As autocast does it: where the products have a compute type of their own, adapters have it.
    const auto param = [&](int which) {
      const Tensor& t = tensors_.adapters[slot + which];
      return spec_.compute == at::ScalarType::Undefined ? t : in_type(t, P_);
    };
    Adapter adapter{param(0),        rows(param(1)),
                    rows(param(2)),  spec_.lora[i].scale,
                    spec_.lora[i].p, int64_t(kFirstAdapterSite + i)};
    if (gradients) {
      adapter.da = sums_[kLossAdapters + slot];
      adapter.db = rows(sums_[kLossAdapters + slot + 1]);
      adapter.dbias = rows(sums_[kLossAdapters + slot + 2]);
      if (!need(kLossX) && !adapter.da.defined() && !adapter.db.defined() &&
          !adapter.dbias.defined()) {
        continue;
      }
    }
    list.push_back(std::move(adapter));
  }
  return list;
}

// out = the products of rows from row0 on with the classes from col0 on, as logits before their
// map.
void LossHead::logits(const Tensor& out, const Tensor& x, int64_t row0, int64_t col0) {
  const int64_t cols = out.size(1);
  std::optional<Tensor> bias;
  if (bias_.defined()) bias = part_of(bias_, 0, col0, cols);
  linear_out(out, x, part_of(weight_, 0, col0, cols), bias, false);
  const AdapterPlace place{row0, 0, C_, {}, tensors_.rng};
  (on_cpu(out) ? adapters_fwd_cpu : adapters_fwd_aten)(out, x, adapters(col0, cols, false), place);
}

// The gradients' buffers. What is added up over pieces has the accumulation type; `whole` says that
// x's, or the weight's, is made by one product and can have its own; not so float16, see
// gradients().
void LossHead::make_gradients(bool whole_x, bool whole_weight) {
  if (need(kLossX)) {
    const Ledger::Name name("d x");
    sums_[kLossX] = empty({N_, C_}, whole_x ? P_ : A_);
  }
  const Ledger::Name name("d head");
  if (need(kLossWeight)) {
    const bool own = whole_weight && tensors_.weight.scalar_type() == P_ && P_ != at::kHalf;
    sums_[kLossWeight] = empty({V_, C_}, own ? P_ : A_);
  }
  const auto add_up = [&](int slot, const Tensor& like) {
    if (need(slot)) sums_[slot] = empty(like.sizes(), A_).zero_();
  };
  add_up(kLossBias, tensors_.bias);
  for (size_t i = 0; i < tensors_.adapters.size(); ++i) {
    add_up(int(kLossAdapters + i), tensors_.adapters[i]);
  }
}

// The share of the rows from row0 on with the classes from col0 on. first: of those that are added
// to the same gradients.
void LossHead::add_gradients(const Tensor& dlogits, const Tensor& x, int64_t row0, int64_t col0,
                             bool first_of_x, bool first_of_weight) {
  const int64_t rows = dlogits.size(0), cols = dlogits.size(1);
  Tensor dx;
  if (need(kLossX)) {
    dx = part_of(sums_[kLossX], 0, row0, rows);
    matmul_out(dx, dlogits, part_of(weight_, 0, col0, cols), !first_of_x);
  }
  if (need(kLossWeight)) {
    matmul_out(part_of(sums_[kLossWeight], 0, col0, cols), dlogits.t(), x, !first_of_weight);
  }
  if (need(kLossBias)) column_sums_out(part_of(sums_[kLossBias], 0, col0, cols), dlogits, true);
  const AdapterPlace place{row0, 0, C_, {}, tensors_.rng};
  const Adapters list = adapters(col0, cols, true);
  if (list.empty()) return;
  (on_cpu(dlogits) ? adapters_bwd_cpu : adapters_bwd_aten)(dlogits, x, dx, list, place);
}

// The gradients asked for as they are kept between forward and backward: x's in its type, the
// weight's in its own but for float16, in which a sum over all tokens may overflow before it is
// scaled; the rest in the accumulation type.
std::vector<Tensor> LossHead::gradients() {
  std::vector<Tensor> result;
  for (size_t slot = 0; slot < needs_.size(); ++slot) {
    if (!needs_[slot]) continue;
    Tensor grad = std::move(sums_[slot]);
    if (slot == kLossX) grad = grad.to(tensors_.x.scalar_type()).view(tensors_.x.sizes());
    const at::ScalarType own = tensors_.weight.scalar_type();
    if (slot == kLossWeight && own != at::kHalf) grad = grad.to(own);
    result.push_back(std::move(grad));
  }
  return result;
}

std::vector<Tensor> LossHead::forward() {
  const Tensor loss = empty({N_}, A_), lse = empty({N_}, A_), predicted = empty({N_}, at::kLong);
  const bool grad = std::any_of(needs_.begin(), needs_.end(), [](bool need) { return need; });
  const int64_t step = row_step(grad && need(kLossWeight));
  if (grad) make_gradients(/*whole_x=*/true, /*whole_weight=*/step >= N_);
  const Tensor buffer = logits_buffer(step, V_);
  for (int64_t row = 0; row < N_; row += step) {
    const int64_t rows = std::min(step, N_ - row);
    const Tensor out = matrix(buffer, rows, V_);
    const Tensor x = in_type(part_of(x_, 0, row, rows), P_);
    logits(out, x, row, 0);
    call::cross_entropy_fwd(out, part_of(tensors_.target, 0, row, rows), class_weight_,
                            part_of(loss, 0, row, rows), part_of(lse, 0, row, rows),
                            part_of(predicted, 0, row, rows), grad, args());
    if (grad) add_gradients(out, x, row, 0, true, row == 0);
  }
  const at::IntArrayRef shape = target_sizes_;
  std::vector<Tensor> result = {loss.view(shape), lse.view(shape), predicted.view(shape)};
  if (grad) {
    if (N_ == 0) zero_products();
    for (Tensor& t : gradients()) result.push_back(std::move(t));
  }
  return result;
}

// Without rows no product writes the gradients.
void LossHead::zero_products() {
  for (const int slot : {int(kLossX), int(kLossWeight)}) {
    if (sums_[slot].defined()) sums_[slot].zero_();
  }
}

std::vector<Tensor> LossHead::backward(const Tensor& dloss, const Tensor& lse) {
  // One number scales the results, so that their bits are those of gradients made in forward.
  const bool each = dloss.dim() > 0;
  const Tensor factor = each ? dloss.to(A_).contiguous().view({N_}) : Tensor();
  // Slices of the classes make the gradient of a trained weight slice by slice and add up x's; of a
  // frozen one, pieces of the rows make x's piece by piece and add up nothing.
  const bool by_class = need(kLossWeight);
  const int64_t rows = by_class ? N_ : row_step(false);
  const int64_t cols = by_class ? col_step(need(kLossX)) : V_;
  make_gradients(/*whole_x=*/cols >= V_, /*whole_weight=*/true);
  if (N_ == 0) zero_products();
  const Tensor row_lse = lse.contiguous().view({N_}), buffer = logits_buffer(rows, cols);
  for (int64_t row = 0; row < N_; row += rows) {
    const int64_t n = std::min(rows, N_ - row);
    const Tensor x = in_type(part_of(x_, 0, row, n), P_);
    const Tensor target = part_of(tensors_.target, 0, row, n);
    for (int64_t col = 0; col < V_; col += cols) {
      const int64_t k = std::min(cols, V_ - col);
      const Tensor out = matrix(buffer, n, k);
      logits(out, x, row, col);
      call::cross_entropy_bwd(out, target, class_weight_, part_of(row_lse, 0, row, n),
                              each ? part_of(factor, 0, row, n) : factor, V_, col, args());
      add_gradients(out, x, row, col, col == 0, true);
    }
  }
  std::vector<Tensor> result = gradients();
  if (!each) {
    for (const Tensor& t : result) scale_gradient(t, dloss);
  }
  return result;
}

}  // namespace ckptfused
