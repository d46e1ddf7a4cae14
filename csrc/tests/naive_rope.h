#pragma once

#include <cstdint>
#include <vector>

#include "math/rope.h"

namespace ckptfused {

// The rotation of a head as a matrix with two entries a row, forward or transposed, by a token's
// `half` cosines and sines.
inline std::vector<double> naive_rope(const std::vector<double>& from, RopeKind rope,
                                      const double* cos, const double* sin, int64_t half,
                                      bool transposed) {
  std::vector<double> v = from;
  const bool paired = rope == RopeKind::interleaved;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = paired ? 2 * i : i, second = paired ? 2 * i + 1 : i + half;
    const double s = transposed ? -sin[i] : sin[i];
    v[first] = from[first] * cos[i] - from[second] * s;
    v[second] = from[first] * s + from[second] * cos[i];
  }
  return v;
}

}  // namespace ckptfused
