#include "kernels/cpu/adapter.h"

#include "tests/util.h"

namespace ckptfused {
namespace {

constexpr int64_t kState[2] = {987654321, 4};
constexpr int64_t kRows = 6, kGap = 3;

template <typename T>
class AdapterRows : public testing::Test {};
using Types = testing::Types<double, float, bf16, f16>;
TYPED_TEST_SUITE(AdapterRows, Types);

// Blocks with and without dropout, in either order of rows, within a wider and longer tensor.
std::vector<AdapterBlock> blocks(int64_t cols) {
  std::vector<AdapterBlock> list = {{kRows, cols}};
  for (const double p : {0.3, 1.0}) {
    AdapterBlock block{kRows, cols};
    block.row0 = 5;
    block.col0 = 11;
    block.dropout = make_dropout(kState, p, 7, block.col0 + cols + 4);
    list.push_back(block);
    block.row_map = {4, 3};
    list.push_back(block);
  }
  return list;
}

double factor(const AdapterBlock& b, int64_t row, int64_t col) {
  if (!b.dropout.active()) return 1.0;
  const bool kept = b.dropout.keep(b.row_map(b.row0 + row), b.col0 + col);
  return kept ? 65536.0 / (65536.0 - b.dropout.threshold) : 0.0;
}

TYPED_TEST(AdapterRows, LoadDropsAndWidens) {
  using T = TypeParam;
  for (const int64_t cols : odd_widths()) {
    const int64_t stride = cols + kGap;
    const Values<T> in = random_values<T>(kRows * stride, 1);
    for (const AdapterBlock& block : blocks(cols)) {
      std::vector<acc_t<T>> out(size_t(kRows * cols), acc_t<T>(NAN));
      std::vector<double> want;
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          want.push_back(in.exact[r * stride + c] * factor(block, r, c));
        }
      }
      adapter_load_rows<T>(block, in.stored.data(), stride, out.data());
      expect_close(out.data(), want, largest(want), 2, "cols " + std::to_string(cols));
    }
  }
}

TYPED_TEST(AdapterRows, AddRoundsOnce) {
  using T = TypeParam;
  for (const int64_t cols : odd_widths()) {
    const int64_t stride = cols + kGap;
    const Values<acc_t<T>> in = random_values<acc_t<T>>(kRows * cols, 2);
    for (const AdapterBlock& block : blocks(cols)) {
      Values<T> out = random_values<T>(kRows * stride, 3);
      std::vector<double> want = out.exact;  // the gaps between rows stay
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          want[r * stride + c] += in.exact[r * cols + c] * factor(block, r, c);
        }
      }
      adapter_add_rows<T>(block, in.stored.data(), out.stored.data(), stride);
      expect_close(out.stored.data(), want, largest(want), 3, "cols " + std::to_string(cols));
    }
  }
}

TEST(Adapter, SumsOfRowsAndOfPartials) {
  const int64_t rows = 37;
  for (const int64_t cols : odd_widths()) {
    const Values<float> in = random_values<float>(rows * cols, 4);
    std::vector<float> sums(size_t(cols), 0.5f), total(size_t(cols), -1.0f);
    std::vector<double> want_sums(size_t(cols), 0.5), want_total(size_t(cols), -1.0);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        want_sums[c] += 0.25 * in.exact[r * cols + c];
        want_total[c] += in.exact[r * cols + c];
      }
    }
    adapter_sum_rows<float>(rows, cols, in.stored.data(), 0.25f, sums.data());
    adapter_add_partials<float>(in.stored.data(), rows, cols, cols, total.data());
    expect_close(sums.data(), want_sums, largest(want_sums), rows, "sums");
    expect_close(total.data(), want_total, largest(want_total), rows, "partials");
  }
}

}  // namespace
}  // namespace ckptfused
