#pragma once

#include <cstdint>

#include "kernels/norm.h"
#include "math/dropout.h"

namespace ckptfused {

// What the residual kernels of every device take; shapes and dtype pairs as in kernels/norm.h.

// s = x + m * drop(post(f)) rounded to r; sum = s; normed = next(s).
struct ResidualFwd {
  int64_t cols;
  DType r, p;
  const void* x;  // r
  const void* f;  // p
  NormKind post;  // none: f itself
  double post_eps;
  NormParam post_weight, post_bias;
  double m;
  Dropout dropout;
  RowMap row_map;
  void* sum;      // r, or null
  NormKind next;  // of normed
  double next_eps;
  NormParam next_weight, next_bias;
  void* normed;        // or null
  DType normed_dtype;  // r or p
};

// df = the gradient of f in m * drop(post(f)); df may be f, or ds if the dtypes agree.
struct ResidualBwd {
  int64_t cols;
  DType r, p;
  const void* ds;  // r
  const void* f;   // p, null without a post norm
  NormKind post;
  double post_eps;
  NormParam post_weight;
  double m;
  Dropout dropout;
  RowMap row_map;
  void* df;  // p
};

}  // namespace ckptfused
