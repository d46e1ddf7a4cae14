#pragma once

#include <cstdint>

#include "math/types.h"

namespace ckptfused {

// to[c] = from[0][c] + from[1][c] + ...: a parameter's gradient of the sums that each chunk of rows
// left. from: acc [count, cols]; to: [cols] of any type.
struct GradSum {
  const void* from;
  void* to;
  int64_t count, cols;
  DType type;  // of to
};

}  // namespace ckptfused
