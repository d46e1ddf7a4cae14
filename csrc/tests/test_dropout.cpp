#include "kernels/cpu/dropout.h"

#include <memory>

#include "kernels/cpu/rows.h"
#include "tests/util.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(void, dropout_mask,
                    (const Dropout&, int64_t, int64_t, int64_t, uint16_t*, bool*))

namespace {

constexpr int64_t kState[2] = {int64_t(0x8123456789abcdefull), (int64_t(0xabcdef) << 32) | 0x1234};

TEST(Dropout, ThresholdRoundsHalfToEven) {
  EXPECT_EQ(dropout_threshold(0.0), 0u);
  EXPECT_EQ(dropout_threshold(1.0), 65536u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);
  EXPECT_EQ(dropout_threshold(0.5 / 65536), 0u);
  EXPECT_EQ(dropout_threshold(1.5 / 65536), 2u);
  EXPECT_EQ(dropout_threshold(2.5 / 65536), 2u);
}

TEST(Dropout, KeepFollowsTheCounterLayout) {
  const int64_t cols = 13, row = 7;
  const Dropout d = make_dropout(kState, 0.3, 2, cols);
  for (int64_t col = 0; col < cols; ++col) {
    const uint64_t element = uint64_t(row * 16 + col);
    const Philox4x32 words = philox4x32<7>(uint32_t(element >> 3), 0, 0x1234, 0xabcdefu | 2u << 24,
                                           0x89abcdefu, 0x81234567u);
    const uint32_t draw = words.word[(element & 7) >> 1] >> (16 * (element & 1)) & 0xffff;
    EXPECT_EQ(d.keep(row, col), draw >= dropout_threshold(0.3));
  }
}

// Rows far enough out that the high counter word changes within a row.
TEST(Dropout, MaskRowsEqualKeep) {
  for (const auto& kernel : CKPT_KERNELS(dropout_mask)) {
    for (const int64_t cols : odd_widths()) {
      for (const double p : {1e-3, 0.1, 0.5, 1.0}) {
        const Dropout d = make_dropout(kState, p, 3, cols);
        for (const int64_t begin : {int64_t(0), (int64_t(1) << 32) / d.groups_per_row}) {
          const auto mask = std::make_unique<bool[]>(size_t(cols));
          std::vector<uint16_t> buffer(size_t(dropout_buffer_size(cols)));
          for (int64_t row = begin; row < begin + 3; ++row) {
            kernel.run(d, row, 0, cols, buffer.data(), mask.get());
            for (int64_t c = 0; c < cols; ++c) {
              ASSERT_EQ(mask[c], d.keep(row, c))
                  << kernel.target << ", width " << cols << ", row " << row << ", column " << c;
            }
          }
        }
      }
    }
  }
}

TEST(Dropout, DrawsOfAColumnRange) {
  const int64_t cols = 100, row = 5;
  const Dropout d = make_dropout(kState, 0.4, 0, cols);
  for (const auto& kernel : CKPT_KERNELS(dropout_mask)) {
    for (int64_t begin = 0; begin < 20; ++begin) {
      for (int64_t end = begin + 1; end <= cols; ++end) {
        // Exactly as large as is asked for: the sanitizer sees a draw beyond it.
        std::vector<uint16_t> buffer(size_t(dropout_buffer_size(end - begin)));
        const auto mask = std::make_unique<bool[]>(size_t(end - begin));
        kernel.run(d, row, begin, end, buffer.data(), mask.get());
        for (int64_t c = begin; c < end; ++c) {
          ASSERT_EQ(mask[c - begin], d.keep(row, c)) << kernel.target;
        }
      }
    }
  }
}

TEST(Dropout, ScaleKeepsTheMean) {
  EXPECT_EQ(make_dropout(kState, 0.5, 0, 8).scale_as<double>(), 2.0);
  EXPECT_EQ(make_dropout(kState, 1.0, 0, 8).scale_as<float>(), 0.0f);
  const Dropout d = make_dropout(kState, 0.1, 0, 8);
  EXPECT_EQ(d.scale_as<float>(), d.scale);
  EXPECT_EQ(dropout_apply(NAN, 0, d.threshold, 1.0f), 0.0f);
  EXPECT_TRUE(std::isnan(dropout_apply(NAN, 65535, d.threshold, 1.0f)));
}

TEST(Dropout, RowMapOfSequenceFirst) {
  const int64_t batch = 3, tokens = 5;
  RowMap map;
  EXPECT_EQ(map(7), 7);
  map.outer = tokens;
  map.inner = batch;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t b = 0; b < batch; ++b) EXPECT_EQ(map(t * batch + b), b * tokens + t);
  }
}

}  // namespace
}  // namespace ckptfused
