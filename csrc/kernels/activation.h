#pragma once

#include <cstdint>

#include "math/activation.h"
#include "math/dropout.h"
#include "math/types.h"

namespace ckptfused {

// What the activation kernels of every device take.

// A [rows, cols] tensor whose rows lie stride elements apart.
template <typename Pointer>
struct Strided {
  Pointer data = nullptr;
  int64_t stride = 0;
};

// The part of an [N, F] hidden tensor that a call covers: its row 0 and column 0 are row row0 and
// column col0 of the tensor that the dropout mask belongs to.
struct ActivationShape {
  DType dtype;
  Activation act;
  bool gated;
  int64_t cols;
  int64_t row0, col0;
  RowMap rows;
  Dropout dropout;
  // xIELU's coefficients, XieluCoefficients of the accumulation type; null for others.
  const void* coefficients;

  template <typename A>
  CKPT_HD XieluCoefficients<A> coefficients_as() const {
    return coefficients == nullptr ? XieluCoefficients<A>{}
                                   : *static_cast<const XieluCoefficients<A>*>(coefficients);
  }
};

// Sums that a backward leaves of a row: of so many columns each on a GPU, of all in the first of
// them on a CPU. What no sum is left in is for the caller to clear.
constexpr int64_t kSumColumns = 8192;
inline int64_t coefficient_sums(int64_t rows, int64_t cols) {
  return rows * ((cols + kSumColumns - 1) / kSumColumns);
}

// h = drop(act(g) * u), or drop(act(u)) when not gated. h may be g or u.
struct ActivationFwd : ActivationShape {
  Strided<const void*> g, u;
  Strided<void*> h;
};

// dg and du from the gradient dh of the dropped h, and h itself once more; each of h, dg and du
// may be left out (null), and any of them may lie over g, u or dh.
struct ActivationBwd : ActivationShape {
  Strided<const void*> g, u, dh;
  Strided<void*> h, dg, du;
  // The sums of the gradients of xIELU's coefficients, [coefficient_sums, 4]; null: not asked for.
  void* sums;
};

}  // namespace ckptfused
