#pragma once

#include <cmath>

#include "math/macros.h"

namespace ckptfused {

// half pairs entry i with entry i + r/2 of the r rotary entries; interleaved pairs 2i with 2i + 1.
enum class RopeKind : int { none, half, interleaved };

// A pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin); with -sin, the transpose. On device
// the compiler contracts one of the products: which one is said here, so that every kernel agrees.
template <typename A>
CKPT_HD A rope_first(A x1, A x2, A cos, A sin) {
#if CKPT_DEVICE
  return std::fma(x1, cos, -(x2 * sin));
#else
  return x1 * cos - x2 * sin;
#endif
}
template <typename A>
CKPT_HD A rope_second(A x1, A x2, A cos, A sin) {
#if CKPT_DEVICE
  return std::fma(x2, cos, x1 * sin);
#else
  return x2 * cos + x1 * sin;
#endif
}

}  // namespace ckptfused
