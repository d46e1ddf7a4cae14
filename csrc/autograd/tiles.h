#pragma once

#include <algorithm>
#include <cstdint>

namespace ckptfused {

// How the FFN half cuts its work. The partition is a function of shape and limit alone and is the
// same in forward and backward, because a product of 2048 rows and two of 1024 differ in bits.
struct FFNTiles {
  int64_t rows;  // rows of a tile; all of them when the columns are cut
  int64_t cols;  // hidden columns of a tile; all of them when the rows are cut
};

// Bytes of hidden-wide scratch that one backward takes in one piece where the caller says nothing.
// A GPU fills its waves with large products only: a Llama-3-8B layer at 16,384 tokens is left
// whole.
inline int64_t ffn_scratch_limit(int64_t asked, bool cuda) {
  return asked > 0 ? asked : cuda ? int64_t(3) << 29 : int64_t(256) << 20;
}

// Tiles start at multiples of these: whole vectors, and whole Philox calls.
constexpr int64_t kRowAlign = 64, kColAlign = 64;

inline FFNTiles ffn_tiles(int64_t rows, int64_t width, int64_t hidden, bool gated,
                          int64_t element_size, int64_t limit) {
  const int64_t scratch = (gated ? 3 : 2) * rows * hidden * element_size;
  const int64_t count = (scratch + limit - 1) / limit;
  if (count <= 1) return {rows, hidden};
  // Sums over tiles are held in the accumulation type where that is wider than the storage type:
  // all weight gradients when the rows are cut, the input gradient (and one partial product) when
  // the columns are.
  const bool narrow = element_size < 4;
  const int64_t row_sums = narrow ? (gated ? 3 : 2) * width * hidden * 4 : 0;
  const int64_t col_sums = narrow ? rows * width * 4 : 0;
  const auto step = [count](int64_t size, int64_t align) {
    const int64_t even = (size + count - 1) / count;
    return std::min(size, (even + align - 1) / align * align);
  };
  const int64_t row_step = step(rows, kRowAlign), col_step = step(hidden, kColAlign);
  const int64_t row_total = scratch / rows * row_step + row_sums;
  const int64_t col_total = scratch / hidden * col_step + col_sums;
  if (std::min(row_total, col_total) >= scratch) return {rows, hidden};
  return row_total <= col_total ? FFNTiles{row_step, hidden} : FFNTiles{rows, col_step};
}

}  // namespace ckptfused
