#pragma once

#include <cstdint>

#include "math/dropout.h"
#include "math/norm.h"
#include "math/types.h"

namespace ckptfused {

// Rows [begin, end) of [N, C] tensors. "acc" buffers hold double if the rows do, else float. The
// dtype pair (r, p) is one of for_row_types (rows.h); both functions return false for any other.

// s = x + m * drop(post(f)) rounded to r; sum = s; normed = next(s).
struct ResidualFwd {
  int64_t cols;
  DType r, p;
  const void* x;  // r
  const void* f;  // p
  NormKind post;  // none: f itself
  double post_eps;
  const void* post_weight;  // [C] acc; the weight is there where the norm is, the bias may be null
  const void* post_bias;
  double m;
  Dropout dropout;
  RowMap row_map;
  void* sum;      // r, or null
  NormKind next;  // of normed
  double next_eps;
  const void* next_weight;
  const void* next_bias;
  void* normed;        // or null
  DType normed_dtype;  // r or p
};
bool residual_fwd_rows(const ResidualFwd& a, int64_t begin, int64_t end);

// df = the gradient of f in m * drop(post(f)); df may be f, or ds if the dtypes agree. The post
// norm's parameter gradients are added to dweight and dbias, [C] acc, unless null.
struct ResidualBwd {
  int64_t cols;
  DType r, p;
  const void* ds;  // r
  const void* f;   // p, null without a post norm
  NormKind post;
  double post_eps;
  const void* post_weight;
  double m;
  Dropout dropout;
  RowMap row_map;
  void* df;  // p
};
bool residual_bwd_rows(const ResidualBwd& a, int64_t begin, int64_t end, void* dweight,
                       void* dbias);

}  // namespace ckptfused
