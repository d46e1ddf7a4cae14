#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ckptfused {

// How the FFN half cuts its work. The partition is a function of shape and limit alone and is the
// same in forward and backward, because a product of 2048 rows and two of 1024 differ in bits. On a
// GPU a step is at most the largest that fits, and that whose products fill their last waves.
struct FFNTiles {
  int64_t rows;  // rows of a tile; all of them when the columns are cut
  int64_t cols;  // hidden columns of a tile; all of them when the rows are cut
};

// Bytes of scratch that the attention and the FFN of a backward each take in one piece where the
// caller says nothing. A GPU fills its waves with large products only: a Llama-3-8B layer at 16,384
// tokens is left whole.
inline int64_t scratch_limit(int64_t asked, bool cuda) {
  return asked > 0 ? asked : cuda ? int64_t(3) << 29 : int64_t(256) << 20;
}

// Tiles start at multiples of these: whole vectors, and whole Philox calls.
constexpr int64_t kRowAlign = 64, kColAlign = 64;

// What a GPU multiplies in the time of a tile: its products by whole waves of 128 x 256 results,
// and the float32 sums that it adds to. An H100's and an H200's numbers, whatever the card, so that
// bits are a function of shape and option: 132 multiprocessors, 92 multiplications in the time of a
// byte (790 TFLOP/s, 4.3 TB/s).
class TileWork {
 public:
  TileWork(int64_t width, int64_t hidden, bool gated)
      : width_(width), hidden_(hidden), up_(gated ? 2 : 1) {}

  int64_t of(int64_t rows, int64_t cols) const {
    if (rows == 0 || cols == 0) return 0;
    const int64_t made = 2 * product(rows, up_ * cols, width_);  // in forward and in backward
    const int64_t inputs = product(rows, cols, width_) + product(rows, width_, up_ * cols);
    const int64_t weights = product(width_, cols, rows) + product(up_ * cols, width_, rows);
    const int64_t sums = cols < hidden_ ? rows * width_ : (up_ + 1) * width_ * hidden_;
    return made + inputs + weights + 92 * 8 * sums;
  }

 private:
  static int64_t product(int64_t rows, int64_t cols, int64_t depth) {
    const int64_t tiles = (rows + 127) / 128 * ((cols + 255) / 256);
    return (tiles + 131) / 132 * 132 * 128 * 256 * depth;
  }

  int64_t width_, hidden_, up_;
};

// The steps through size, of at most `most` each, that take the least work; the longest of those.
template <typename Work>
int64_t least_work(int64_t size, int64_t most, int64_t align, Work work) {
  int64_t best = most, least = std::numeric_limits<int64_t>::max();
  for (int64_t step = most; 2 * step > most && step >= align; step -= align) {
    const int64_t total = size / step * work(step) + work(size % step);
    if (total < least) best = step, least = total;
  }
  return best;
}

// Bytes of what a backward of an FFN has at once without tiles: its hidden values, and those of its
// projections or their gradients.
inline int64_t ffn_scratch(int64_t rows, int64_t hidden, bool gated, int64_t element_size) {
  return (gated ? 3 : 2) * rows * hidden * element_size;
}

inline FFNTiles ffn_tiles(int64_t rows, int64_t width, int64_t hidden, bool gated,
                          int64_t element_size, int64_t limit, bool cuda) {
  const int64_t scratch = ffn_scratch(rows, hidden, gated, element_size);
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
  // Of gate and up columns, the weights side by side and their gradients.
  const int64_t joined = gated ? 2 * 2 * col_step * width * element_size : 0;
  const int64_t col_total = scratch / hidden * col_step + col_sums + joined;
  if (std::min(row_total, col_total) >= scratch) return {rows, hidden};
  const bool cut_rows = row_total <= col_total;
  if (!cuda) return cut_rows ? FFNTiles{row_step, hidden} : FFNTiles{rows, col_step};
  const TileWork work(width, hidden, gated);
  const auto of_rows = [&](int64_t step) { return work.of(step, hidden); };
  const auto of_cols = [&](int64_t step) { return work.of(rows, step); };
  return cut_rows ? FFNTiles{least_work(rows, row_step, kRowAlign, of_rows), hidden}
                  : FFNTiles{rows, least_work(hidden, col_step, kColAlign, of_cols)};
}

// What a block by tiles of queries takes, of tokens of so many sequences.
struct QueryWork {
  int64_t batches;
  int64_t q_width, kv_width;  // of all heads
  int64_t weights;            // numbers
  int64_t element_size, sum_size;
};

// Tokens of a tile of queries; all of them where that takes no more. A tile's q, k and v, their
// gradients, o, its gradient and what is made of them are as wide as three of q, k and v together
// and three of q; all k, v and the sums of their gradients, and where the type is narrow those of
// weights, come on top. asked: the caller's limit, or 0; a tile is then a quarter of the device's,
// which takes no longer.
inline int64_t query_tile(int64_t tokens, const QueryWork& w, int64_t asked) {
  const int64_t token_bytes = w.batches * w.element_size * (6 * w.q_width + 6 * w.kv_width);
  const int64_t whole = tokens * token_bytes;
  const int64_t limit = scratch_limit(asked, /*cuda=*/false);
  if (whole <= limit) return tokens;
  const int64_t piece = asked > 0 ? limit : limit / 4;
  const int64_t count = (whole + piece - 1) / piece;
  const int64_t even = (tokens + count - 1) / count;
  const int64_t step = std::min(tokens, (even + kRowAlign - 1) / kRowAlign * kRowAlign);
  const int64_t keys = tokens * w.batches * 2 * w.kv_width * (w.element_size + w.sum_size);
  const int64_t sums = w.element_size < w.sum_size ? w.weights * w.sum_size : 0;
  return step * token_bytes + keys + sums < whole ? step : tokens;
}

}  // namespace ckptfused
