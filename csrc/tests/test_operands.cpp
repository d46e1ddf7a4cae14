#include "kernels/cpu/operands.h"

#include <gtest/gtest.h>

#include "tests/util.h"

namespace ckptfused {
namespace {

template <typename Stored, typename Multiplied>
struct Types {
  using T = Stored;
  using C = Multiplied;
};

template <typename Pair>
class Operands : public testing::Test {};
using OperandTypes = testing::Types<Types<double, double>, Types<float, float>, Types<float, bf16>,
                                    Types<bf16, float>, Types<bf16, bf16>, Types<f16, float>>;
TYPED_TEST_SUITE(Operands, OperandTypes);

// Rows and columns around the blocks that copies are made in; strides with something between.
constexpr int64_t kSizes[][2] = {{1, 1}, {5, 8}, {16, 7}, {33, 64}, {40, 19}};

// The entry of a matrix [rows, cols] that a product finds at (row, col) of a right operand.
template <typename C>
double right_at(const std::vector<C>& right, int64_t cols, int64_t row, int64_t col) {
  constexpr int64_t kAbreast = kRowsAbreast<C>;
  return double(to_acc(right[(row / kAbreast * cols + col) * kAbreast + row % kAbreast]));
}

TYPED_TEST(Operands, AreTheirMatricesWithZerosAround) {
  using T = typename TypeParam::T;
  using C = typename TypeParam::C;
  for (const auto& [rows, cols] : kSizes) {
    const int64_t stride = cols + 3, out_rows = (rows + 31) / 32 * 32, out_cols = cols + cols % 2;
    const auto x = random_values<T>(rows * stride, 1);
    const auto want = [&](int64_t r, int64_t c) {
      const bool inside = r < rows && c < cols;
      return inside ? double(to_acc(store<C>(x.exact[r * stride + c]))) : 0.0;
    };
    const std::vector<C> unset(out_rows * out_cols + 1, store<C>(7.0));
    std::vector<C> left = unset, left_t = unset, right = unset, right_t = unset;
    left_rows(x.stored.data(), stride, rows, cols, left.data(), out_rows, out_cols);
    left_columns(x.stored.data(), stride, rows, cols, left_t.data(), out_rows);
    right_rows(x.stored.data(), stride, rows, cols, right.data(), out_rows);
    right_columns(x.stored.data(), stride, rows, cols, right_t.data(), out_cols, out_rows);
    for (int64_t r = 0; r < out_rows; ++r) {
      for (int64_t c = 0; c < out_cols; ++c) {
        ASSERT_EQ(double(to_acc(left[r * out_cols + c])), want(r, c));
        if (c < cols) ASSERT_EQ(double(to_acc(left_t[c * out_rows + r])), want(r, c));
        if (c < cols) ASSERT_EQ(right_at(right, cols, r, c), want(r, c));
        const bool exists = c < cols || kRowsAbreast<C> == 2;
        if (exists) ASSERT_EQ(right_at(right_t, out_rows, c, r), want(r, c));
      }
    }
    for (const auto& operand : {left, left_t, right, right_t}) {
      ASSERT_EQ(double(to_acc(operand.back())), 7.0);
    }
  }
}

TEST(Sums, OfTransposedProducts) {
  constexpr int64_t kRows = 37, kCols = 9, kStride = 11, kProducts = 40;
  const auto products = random_values<float>(kCols * kProducts, 2);
  std::vector<float> sums(kRows * kStride, 1.0f);
  add_transposed(products.stored.data(), kProducts, kRows, kCols, sums.data(), kStride);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t c = 0; c < kStride; ++c) {
      const float added = c < kCols ? products.stored[c * kProducts + r] : 0.0f;
      EXPECT_EQ(sums[r * kStride + c], 1.0f + added);
    }
  }
}

}  // namespace
}  // namespace ckptfused
