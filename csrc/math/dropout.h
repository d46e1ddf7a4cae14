#pragma once

#include <cstdint>

#include "math/philox.h"

namespace ckptfused {

// Which tensor of a block a mask belongs to.
enum class DropoutSite : int { attention_probs = 0, attention_residual, ffn_hidden, ffn_residual };

// So many fit the eight bits that a site has in the counter. Adapters come after those of a block.
constexpr int kDropoutSites = 256, kFirstAdapterSite = 4;

// One dropout mask as a pure function of (seed, offset, site, element). An element of row r and
// column c has index r * 8*ceil(cols/8) + c; one Philox call decides the eight elements that share
// index >> 3, sixteen bits each. A default-constructed value drops nothing and draws nothing.
struct Dropout {
  uint32_t key0 = 0, key1 = 0;
  uint32_t counter2 = 0, counter3 = 0;
  uint32_t threshold = 0;  // keep iff the 16-bit draw >= threshold; 65536 drops all
  float scale = 1.0f;      // 65536 / (65536 - threshold), 0 when all is dropped
  int64_t groups_per_row = 0;

  CKPT_HD bool active() const { return threshold != 0; }

  // The draws of elements 8*group .. 8*group+7 of a row; lane l sits in bits 16*(l&1) of word l>>1.
  CKPT_HD Philox4x32 draw(int64_t row, int64_t group) const {
    const uint64_t index = uint64_t(row) * uint64_t(groups_per_row) + uint64_t(group);
    return philox4x32<7>(uint32_t(index), uint32_t(index >> 32), counter2, counter3, key0, key1);
  }
  CKPT_HD bool keep(int64_t row, int64_t col) const {
    const Philox4x32 words = draw(row, col >> 3);
    const int lane = int(col & 7);
    return ((words.word[lane >> 1] >> (16 * (lane & 1))) & 0xffffu) >= threshold;
  }

  // The draws of columns col .. col+7 of a row, one in each sixteen bits as in draw(). Where col is
  // no multiple of 8 they come from two calls.
  CKPT_HD Philox4x32 draw_from(int64_t row, int64_t col) const {
    Philox4x32 low = draw(row, col >> 3);
    const int shift = int(col & 7);
    if (shift == 0) return low;
    Philox4x32 high = draw(row, (col >> 3) + 1);
    for (int i = 0; i < shift; ++i) {
      low.word[0] = low.word[0] >> 16 | low.word[1] << 16;
      low.word[1] = low.word[1] >> 16 | low.word[2] << 16;
      low.word[2] = low.word[2] >> 16 | low.word[3] << 16;
      low.word[3] = low.word[3] >> 16 | high.word[0] << 16;
      high.word[0] = high.word[0] >> 16 | high.word[1] << 16;
      high.word[1] = high.word[1] >> 16 | high.word[2] << 16;
      high.word[2] = high.word[2] >> 16 | high.word[3] << 16;
    }
    return low;
  }

  // What kept values are multiplied by, in the accumulation type (scale is its float).
  template <typename A>
  CKPT_HD A scale_as() const {
    if constexpr (sizeof(A) == sizeof scale) return scale;
    return threshold >= 65536u ? A(0) : A(65536) / A(65536u - threshold);
  }
};

// threshold = round-half-even(p * 65536), so that the kept share is exact to 2^-17.
CKPT_HD uint32_t dropout_threshold(double p) {
  const double scaled = p * 65536.0;
  const int64_t floor = int64_t(scaled);
  const double rest = scaled - double(floor);
  const bool up = rest > 0.5 || (rest == 0.5 && (floor & 1) != 0);
  return uint32_t(floor + (up ? 1 : 0));
}

// A dropout that still lacks the state of its call. cols: length of the last dimension of the
// tensor that the mask applies to.
CKPT_HD Dropout make_dropout(double p, int site, int64_t cols) {
  Dropout d;
  d.threshold = dropout_threshold(p);
  if (d.threshold == 0) return d;
  d.counter3 = uint32_t(site) << 24;
  d.scale = d.threshold == 65536u ? 0.0f : 65536.0f / float(65536u - d.threshold);
  d.groups_per_row = (cols + 7) / 8;
  return d;
}

// With the state: (seed, offset) as drawn by the rng_state op.
CKPT_HD Dropout with_state(Dropout d, const int64_t* state) {
  if (!d.active()) return d;
  const uint64_t seed = uint64_t(state[0]), offset = uint64_t(state[1]);
  d.key0 = uint32_t(seed);
  d.key1 = uint32_t(seed >> 32);
  d.counter2 = uint32_t(offset);
  d.counter3 = (d.counter3 & 0xff000000u) | uint32_t((offset >> 32) & 0xffffffu);
  return d;
}

CKPT_HD Dropout make_dropout(const int64_t* state, double p, int site, int64_t cols) {
  return with_state(make_dropout(p, site, cols), state);
}

// Maps a row of the tensor in memory to its batch-first row. Batch-first tensors have inner == 0;
// a [T, B, C] tensor has outer = T, inner = B and memory row t*B + b is logical row b*T + t. Rows
// are counted from the first on.
struct RowMap {
  int64_t outer = 0, inner = 0, first = 0;
  CKPT_HD int64_t operator()(int64_t row) const {
    row += first;
    return inner == 0 ? row : (row % inner) * outer + row / inner;
  }
};

}  // namespace ckptfused
