#include "kernels/cuda/dropout.h"

#include <memory>

#include "kernels/cpu/dropout.h"
#include "tests/util.h"

namespace ckptfused {
namespace {

constexpr int64_t kState[2] = {int64_t(0x8123456789abcdefull), (int64_t(0xabcdef) << 32) | 0x1234};

void expect_cpu_mask(double p, int64_t rows, int64_t cols, int64_t shift) {
  const size_t size = size_t(rows * cols);
  const auto want = std::make_unique<bool[]>(size);
  const auto got = std::make_unique<bool[]>(size + 16);
  dropout_mask_rows(make_dropout(kState, p, 3, cols), cols, 0, rows, want.get());
  got[0] = got[size + size_t(shift)] = true;
  ASSERT_EQ(nullptr, dropout_mask_cuda(make_dropout(p, 3, cols), kState, rows, cols,
                                       got.get() + shift, nullptr));
  for (size_t i = 0; i < size; ++i) {
    ASSERT_EQ(want[i], got[i + size_t(shift)])
        << "width " << cols << ", p " << p << ", element " << i;
  }
  EXPECT_TRUE(shift == 0 || got[0]);
  EXPECT_TRUE(got[size + size_t(shift)]);
}

TEST(DropoutCuda, MasksAreThoseOfTheCpu) {
  for (const int64_t cols : odd_widths()) {
    for (const double p : {1e-3, 0.1, 0.5, 1.0}) {
      if (kThreadSanitizer && p != 0.1) continue;
      expect_cpu_mask(p, 5, cols, p == 0.1 ? 1 : 0);
    }
  }
  expect_cpu_mask(0.1, 2000, 1, 0);
  expect_cpu_mask(0.1, 300, 24, 0);
  expect_cpu_mask(0.1, 2, 20000, 0);
}

TEST(DropoutCuda, ProbabilityZeroKeepsAllAndReadsNoState) {
  bool keep[30] = {};
  EXPECT_EQ(nullptr, dropout_mask_cuda(make_dropout(0.0, 3, 10), nullptr, 3, 10, keep, nullptr));
  for (const bool kept : keep) EXPECT_TRUE(kept);
  EXPECT_EQ(nullptr, dropout_mask_cuda(make_dropout(0.1, 3, 10), kState, 0, 10, keep, nullptr));
}

// Eight draws from any column on, where the group that they start in and the next one meet.
TEST(DropoutCuda, DrawsFromAnyColumn) {
  const Dropout d = make_dropout(kState, 0.4, 0, 100);
  for (int64_t col = 0; col < 92; ++col) {
    const Philox4x32 draws = d.draw_from(5, col);
    for (int i = 0; i < 8; ++i) {
      const uint32_t draw = draws.word[i / 2] >> (16 * (i % 2)) & 0xffff;
      ASSERT_EQ(draw >= d.threshold, d.keep(5, col + i)) << col << " " << i;
    }
  }
}

TEST(DropoutCuda, ScaleInBothTypes) {
  const Dropout d = make_dropout(kState, 0.1, 0, 8);
  EXPECT_EQ(d.scale_as<float>(), 65536.0f / (65536 - 6554));
  EXPECT_EQ(d.scale_as<double>(), 65536.0 / (65536 - 6554));
  EXPECT_EQ(make_dropout(kState, 1.0, 0, 8).scale_as<double>(), 0.0);
  EXPECT_EQ(make_dropout(kState, 0.0, 0, 8).scale_as<double>(), 1.0);
}

}  // namespace
}  // namespace ckptfused
