#pragma once

#include "ops/torch.h"

#include <vector>

// Low-rank adapters (LoRA, Hu et al. 2021) beside a matrix product y = in w^T, as PEFT computes
// them: y += scale * (drop(in) a^T b^T + bias) for each. The arithmetic is in the accumulation
// type, y is rounded once. No [N, K] or [N, M] temporary is made on the CPU: blocks of rows go
// through small products that stay in cache.

namespace ckptfused {

struct Adapter {
  at::Tensor a;     // [r, K]
  at::Tensor b;     // [M, r]
  at::Tensor bias;  // [M] or undefined
  double scale, p;
  int64_t site;
  // Gradients in the accumulation type, added to what is there. Undefined: not asked for.
  at::Tensor da{}, db{}, dbias{};
  // Where the products are of half precision: what a and b, rounded to it, leave; undefined:
  // nothing.
  bool halves = false;
  at::Tensor a_rest{}, b_rest{};
};

// Where `in` lies in the tensor that the dropout applies to (docs of the ops on rows: ops/qk.h,
// ops/activation.h): its first row and column, the width of the whole, the order of its rows.
struct AdapterPlace {
  int64_t row0, col0, cols;
  at::IntArrayRef rows;
  at::Tensor rng;
};

using Adapters = std::vector<Adapter>;

// y += the sum of the adapters of in.
// Shapes: y [n, M], in [n, K], contiguous rows, one dtype.
void adapters_fwd_cpu(const at::Tensor& y, const at::Tensor& in, const Adapters& adapters,
                      const AdapterPlace& place);

// Adds to the gradients that the adapters ask for, and din += the gradient of in.
// Shapes: dy [n, M]; in [n, K], may be undefined where no da and no db is asked for; din [n, K], of
// dy's dtype or its accumulation type, or undefined.
// The sums over rows depend on their number alone, not on the threads.
void adapters_bwd_cpu(const at::Tensor& dy, const at::Tensor& in, const at::Tensor& din,
                      const Adapters& adapters, const AdapterPlace& place);

// What the scratch of a CPU call depends on, apart from copies of a, b and bias in the accumulation
// type where they have another. n rows, ranks of all adapters; backward: whether din is made, and
// whether any asks for da or db, which need the input.
struct AdapterSizes {
  int64_t n, k, m, ranks;
  bool backward = false, din = false, needs_in = false;
};

}  // namespace ckptfused
