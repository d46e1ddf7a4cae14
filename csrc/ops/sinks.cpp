#include "ops/sinks.h"

#include <algorithm>
#include <cmath>

#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

// Bytes of a part's copy in the accumulation type: on a CPU it stays in a core's cache.
constexpr int64_t kCopyCpu = 1 << 20, kCopyGpu = 64 << 20;
// Launches of the two, and of each part of the second.
constexpr int64_t kForward = 6, kBackward = 5, kBackwardPart = 6;

// Tokens [token, token + tokens) of batch elements [batch, batch + batches).
struct Part {
  int64_t batch, batches, token, tokens;

  Tensor of(const Tensor& t) const { return t.narrow(0, batch, batches).narrow(1, token, tokens); }
};

// [B, T, H, D] in parts of that size: whole batch elements, or tokens of one.
std::vector<Part> parts_of(const Tensor& o, int64_t acc_size) {
  const int64_t B = o.size(0), T = o.size(1);
  const int64_t row = std::max<int64_t>(o.size(2) * o.size(3) * acc_size, 1);
  const int64_t rows = std::max<int64_t>((on_cpu(o) ? kCopyCpu : kCopyGpu) / row, 1);
  const int64_t tokens = std::min(rows, T),
                batches = std::max<int64_t>(rows / std::max<int64_t>(T, 1), 1);
  std::vector<Part> parts;
  for (int64_t b = 0; b < B; b += batches) {
    for (int64_t t = 0; t < T; t += tokens) {
      parts.push_back({b, std::min(batches, B - b), t, std::min(tokens, T - t)});
    }
  }
  return parts;
}

// Memory of the accumulation type for the largest of them.
Tensor part_buffer(const std::vector<Part>& parts, const Tensor& o, at::ScalarType acc) {
  const Ledger::Name name("wide rows of o");
  const Part most = parts.empty() ? Part{0, 0, 0, 0} : parts.front();
  return at::empty({most.batches * most.tokens, o.size(2), o.size(3)}, o.options().dtype(acc));
}

Tensor copy_of(const Tensor& part, const Tensor& buffer) {
  return buffer.narrow(0, 0, part.size(0) * part.size(1)).view(part.sizes()).copy_(part);
}

Tensor by_heads(const Tensor& sinks, at::ScalarType acc) {
  return sinks.to(acc).view({-1, 1});
}

// difference = exp(a - b), and 0 where a and b are -inf. Shapes: b and the result [B, H, T].
void exp_difference(Tensor difference, const Tensor& a, const Tensor& b, Tensor nothing) {
  at::sub_out(difference, a, b);
  at::eq_out(nothing, b, -INFINITY);
  difference.masked_fill_(nothing, -INFINITY).exp_();
}

Tensor flags_like(const Tensor& lse) {
  return at::empty_like(lse, lse.options().dtype(at::kBool));
}

}  // namespace

Tensor add_sinks(const Tensor& o, const Tensor& lse, const Tensor& sinks) {
  const at::ScalarType acc = lse.scalar_type();
  Tensor total = at::empty_like(lse);
  const Tensor nothing = flags_like(lse);
  // PyTorch copies half-precision numbers whole before it multiplies them by wider ones on a CPU.
  const bool copied = on_cpu(o) && acc != o.scalar_type();
  const std::vector<Part> parts =
      copied ? parts_of(o, c10::elementSize(acc)) : std::vector<Part>{{0, o.size(0), 0, o.size(1)}};
  const Tensor buffer = copied ? part_buffer(parts, o, acc) : Tensor();
  const Tensor sink = by_heads(sinks, acc);
  const int64_t bytes = 6 * int64_t(lse.nbytes()) + 2 * int64_t(o.nbytes());
  if (counted_launch("add_sinks", bytes / kForward, kForward)) return total;
  at::logaddexp_out(total, lse, sink);
  exp_difference(lse, lse, total, nothing);
  const Tensor factor = lse.transpose(1, 2).unsqueeze(-1);
  for (const Part& part : parts) {
    const Tensor rows = part.of(o);
    if (copied) {
      rows.copy_(copy_of(rows, buffer).mul_(part.of(factor)));
    } else {
      rows.mul_(part.of(factor));
    }
  }
  return total;
}

void sinks_grad_out(const Tensor& grad, const Tensor& dout, const Tensor& o, const Tensor& lse,
                    const Tensor& sinks, bool add) {
  const at::ScalarType acc = lse.scalar_type();
  const std::vector<Part> parts = parts_of(o, c10::elementSize(acc));
  const bool copied = on_cpu(o) && acc != o.scalar_type();
  const Tensor products = part_buffer(parts, o, acc);
  const Tensor wide = copied ? part_buffer(parts, o, acc) : Tensor();
  const Ledger::Name name("probabilities of sinks");
  const Tensor sink = by_heads(sinks, acc);
  const Tensor rows = at::empty({products.size(0), o.size(2)}, lse.options());
  const Tensor weight = at::empty_like(lse), nothing = flags_like(lse);
  Tensor sums = at::empty_like(grad);
  const int64_t bytes = 2 * int64_t(o.nbytes()) + 6 * int64_t(lse.nbytes());
  const int64_t launches = kBackward + kBackwardPart * int64_t(parts.size());
  if (counted_launch("sinks_grad", bytes / launches, launches)) return;
  if (!add) grad.zero_();
  exp_difference(weight, sink, lse, nothing);
  const Tensor probability = weight.transpose(1, 2);
  for (const Part& part : parts) {
    const Tensor out = part.of(o);
    const Tensor made = copy_of(part.of(dout), products).mul_(copied ? copy_of(out, wide) : out);
    Tensor delta = rows.narrow(0, 0, part.batches * part.tokens).view(made.sizes().slice(0, 3));
    at::sum_out(delta, made, at::IntArrayRef{3});
    at::sum_out(sums, delta.mul_(part.of(probability)), at::IntArrayRef{0, 1});
    grad.sub_(sums);
  }
}

}  // namespace ckptfused
