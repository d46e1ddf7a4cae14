#pragma once

#include <algorithm>
#include <cstdint>

namespace ckptfused {

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// Bytes of logits that exist at a time where the caller says nothing, for pieces of rows (of
// classes) with bytes_each, which are multiplied by a weight (an x) `width` wide. Each piece reads
// and writes that other operand and its gradient as a whole, so a piece needs so many rows that its
// products hide it (docs/loss.md), however many classes there are; but no more than half the bytes
// of that operand.
inline int64_t default_loss_scratch(int64_t bytes_each, int64_t width, bool cuda) {
  const int64_t rows = cuda ? 1024 : 512, least = int64_t(cuda ? 256 : 32) << 20;
  return std::max(least, bytes_each * std::min(rows, width / 2));
}

// The size of even pieces that hold at most `scratch` bytes; `size` where the pieces and the sums
// over them would hold as much as the whole.
inline int64_t loss_piece(int64_t size, int64_t bytes_each, int64_t scratch, int64_t align,
                          int64_t sums) {
  const int64_t whole = size * bytes_each;
  if (size == 0 || whole <= scratch) return size;
  const int64_t count = (whole + scratch - 1) / std::max<int64_t>(1, scratch);
  const int64_t step = std::min(size, round_up((size + count - 1) / count, align));
  return step * bytes_each + sums >= whole ? size : step;
}

}  // namespace ckptfused
