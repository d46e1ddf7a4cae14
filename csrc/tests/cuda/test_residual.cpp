#include <limits>

#include "kernels/cpu/residual.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/residual.h"
#include "tests/cuda/rows_util.h"
#include "tests/naive_norm.h"

namespace ckptfused {
namespace {

constexpr double kEps = 1e-5;
constexpr int64_t kState[2] = {987654321, (int64_t(5) << 32) + 4};
constexpr int64_t kBatch = 2, kTokens = 3, kRows = kBatch * kTokens;

struct Setting {
  NormKind post, next;
  double m, p;
  bool seq_first;
};
constexpr Setting kSettings[] = {
    {NormKind::none, NormKind::none, 1.0, 0.0, false},
    {NormKind::none, NormKind::rmsnorm, 1.0, 0.1, false},
    {NormKind::none, NormKind::layernorm, 0.25, 0.0, true},
    {NormKind::layernorm, NormKind::gemma, 0.5, 0.1, true},
    {NormKind::gemma, NormKind::layernorm, 1.0, 1.0, false},
    {NormKind::rmsnorm, NormKind::none, 1.0, 0.5, true},
    {NormKind::layerscale, NormKind::layernorm, 0.5, 0.1, true},
    {NormKind::layerscale, NormKind::rmsnorm, 1.0, 0.0, true},
};

RowMap map_of(const Setting& s) {
  RowMap map;
  if (s.seq_first) {
    map.outer = kTokens;
    map.inner = kBatch;
  }
  return map;
}

template <typename Pair>
class CudaResidual : public testing::Test {};
TYPED_TEST_SUITE(CudaResidual, CudaTypePairs);

// What a call takes and gives; the CPU kernel in double precision says what is wanted, from the
// same values and with the same masks.
template <typename R, typename P, typename O>
void check_forward(const Setting& s, int64_t cols, int turn) {
  const auto x = random_values<R>(kRows * cols, 1);
  const auto f = random_values<P>(kRows * cols, 2);
  const DType dtype = turn % 4 == 3 ? DType::f64 : turn % 2 == 1 ? DType::f32 : dtype_of<P>();
  const Param post_w(dtype, cols, 3), post_b(dtype, cols, 4), next_w(dtype, cols, 5),
      next_b(dtype, cols, 6);
  const bool with_next = s.next != NormKind::none;
  ResidualFwd a{};
  a.cols = cols;
  a.r = dtype_of<R>();
  a.p = dtype_of<P>();
  a.post = s.post;
  a.next = s.next;
  a.post_eps = a.next_eps = kEps;
  if (turn % 5 != 1) a.post_weight = post_w.param;
  if (turn % 3 != 1) a.post_bias = post_b.param;
  if (with_next && turn % 5 != 2) a.next_weight = next_w.param;
  if (with_next && turn % 3 != 2) a.next_bias = next_b.param;
  a.m = s.m;
  a.row_map = map_of(s);
  const std::string what = "width " + std::to_string(cols) + ", turn " + std::to_string(turn);

  // Wanted, in double precision.
  std::vector<double> want(x.exact.size());
  ResidualFwd wide = a;
  wide.r = wide.p = wide.normed_dtype = DType::f64;
  wide.x = x.exact.data();
  wide.f = f.exact.data();
  wide.sum = want.data();
  wide.dropout = make_dropout(kState, s.p, 1, cols);
  ASSERT_TRUE(residual_fwd_rows(wide, 0, kRows));

  a.dropout = make_dropout(s.p, 1, cols);  // the state comes from the device
  a.normed_dtype = dtype_of<O>();
  std::vector<R> first_sum;
  std::vector<O> first_normed;
  for (const bool align : {true, false}) {
    Placed<R> x_at(x.stored, align), sum(x.stored.size(), align);
    Placed<P> f_at(f.stored, align);
    Placed<O> normed(x.stored.size(), align), alone(x.stored.size(), align),
        by_norm(x.stored.size(), align);
    a.x = x_at.data();
    a.f = f_at.data();
    a.sum = sum.data();
    a.normed = normed.data();
    ASSERT_EQ(nullptr, residual_fwd_cuda(a, kState, kRows, kOneMultiprocessor, nullptr));
    EXPECT_TRUE(sum.guards_untouched() && normed.guards_untouched()) << what;
    if (align) first_sum = sum.values(), first_normed = normed.values();
    EXPECT_TRUE(same_bits(first_sum, sum.values()) && same_bits(first_normed, normed.values()))
        << what << ": not the same where it is not aligned";

    // Without the sum the same normed rows; and those of a norm of the sum as it is stored.
    a.sum = nullptr;
    a.normed = alone.data();
    ASSERT_EQ(nullptr, residual_fwd_cuda(a, kState, kRows, kOneMultiprocessor, nullptr));
    EXPECT_TRUE(same_bits(first_normed, alone.values())) << what << ": without sum";
    const NormFwd norm{s.next,     kEps,          cols,        dtype_of<R>(), dtype_of<O>(),
                       sum.data(), a.next_weight, a.next_bias, by_norm.data()};
    ASSERT_EQ(nullptr, norm_fwd_cuda(norm, kRows, kOneMultiprocessor, nullptr));
    EXPECT_TRUE(same_bits(first_normed, by_norm.values())) << what << ": not norm_fwd's bits";
    // The sum alone.
    Placed<R> sum_alone(x.stored.size(), align);
    a.sum = sum_alone.data();
    a.normed = nullptr;
    ASSERT_EQ(nullptr, residual_fwd_cuda(a, kState, kRows, kOneMultiprocessor, nullptr));
    EXPECT_TRUE(same_bits(first_sum, sum_alone.values())) << what << ": without normed";
  }
  for (int64_t r = 0; r < kRows; ++r) {
    const auto f_row = row_of(f.exact, r, cols), x_row = row_of(x.exact, r, cols);
    const NaiveNorm post(s.post, f_row, kEps);
    const double scale =
        largest(x_row) + 2 * (norm_scale(post, largest(f_row)) * (1 + largest(post_w.exact)) +
                              largest(post_b.exact) + largest(f_row));
    expect_close(first_sum.data() + r * cols, row_of(want, r, cols), scale, cuda_terms(cols), what);
    for (int64_t c = 0; c < cols; ++c) {
      // A dropped element adds exactly nothing, on the CPU and here.
      if (want[r * cols + c] == x_row[c]) {
        EXPECT_EQ(double(to_acc(first_sum[r * cols + c])), x_row[c]) << what;
      }
    }
  }
}

TYPED_TEST(CudaResidual, ForwardMatchesCpu) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  int turn = 0;
  for (const int64_t cols : cuda_widths()) {
    for (const Setting& s : kSettings) {
      if ((cols > 2000 || kThreadSanitizer) && ++turn % 3 != 0) continue;
      check_forward<R, P, P>(s, cols, turn++);
      if constexpr (!std::is_same_v<R, P>) {
        if (turn % 3 == 0) check_forward<R, P, R>(s, cols, turn);
      }
    }
  }
}

// Of 16 bits these are held in registers, in four groups a thread: the same bits as where they are
// read anew, since rows that are not aligned are.
TYPED_TEST(CudaResidual, WideRows) {
  if (kThreadSanitizer) return;
  using P = typename TypeParam::P;
  for (const int64_t cols : {12296, 16384}) {
    for (const int turn : {5, 8}) {  // a weight, and no bias
      check_forward<typename TypeParam::R, P, P>(
          {NormKind::none, NormKind::rmsnorm, 0.5, 0.1, true}, cols, turn);
    }
  }
}

TYPED_TEST(CudaResidual, BackwardMatchesCpu) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  int turn = 0;
  for (const int64_t cols : cuda_widths()) {
    const auto ds = random_values<R>(kRows * cols, 1);
    const auto f = random_values<P>(kRows * cols, 2);
    for (const Setting& s : kSettings) {
      if ((cols > 2000 || kThreadSanitizer) && ++turn % 3 != 0) continue;
      ++turn;
      const DType dtype = turn % 4 == 3 ? DType::f64 : turn % 2 == 1 ? DType::f32 : dtype_of<P>();
      const Param w(dtype, cols, 3);
      const bool post = s.post != NormKind::none, need_dw = post && turn % 5 != 0,
                 need_db = post && turn % 3 != 0;
      const int64_t chunks = 1 + turn % 4;
      const std::string what = "width " + std::to_string(cols) + ", turn " + std::to_string(turn);
      ResidualBwd a{};
      a.cols = cols;
      a.r = dtype_of<R>();
      a.p = dtype_of<P>();
      a.post = s.post;
      a.post_eps = kEps;
      if (turn % 5 != 1) a.post_weight = w.param;
      a.m = s.m;
      a.row_map = map_of(s);

      std::vector<double> want(ds.exact.size()), want_dw(size_t(cols), 0.0),
          want_db(size_t(cols), 0.0);
      ResidualBwd wide = a;
      wide.r = wide.p = DType::f64;
      wide.ds = ds.exact.data();
      wide.f = f.exact.data();
      wide.df = want.data();
      wide.dropout = make_dropout(kState, s.p, 3, cols);
      ASSERT_TRUE(residual_bwd_rows(wide, 0, kRows, want_dw.data(), want_db.data()));

      a.dropout = make_dropout(s.p, 3, cols);
      std::vector<P> first;
      std::vector<A> first_dw, first_db;
      for (const bool align : {true, false}) {
        Placed<R> ds_at(ds.stored, align);
        Placed<P> df(f.stored, align);  // in place over f
        Placed<A> dw(size_t(cols), align), db(size_t(cols), align);
        std::vector<A> scratch(size_t(2 * chunks * cols), std::numeric_limits<A>::quiet_NaN());
        a.ds = ds_at.data();
        a.f = post ? df.data() : nullptr;
        a.df = df.data();
        ASSERT_EQ(nullptr,
                  residual_bwd_summed(a, kState, kRows, chunks, need_dw ? scratch.data() : nullptr,
                                      need_db ? scratch.data() + chunks * cols : nullptr,
                                      need_dw ? dw.data() : nullptr, need_db ? db.data() : nullptr,
                                      nullptr));
        EXPECT_TRUE(df.guards_untouched() && dw.guards_untouched() && db.guards_untouched());
        if (align) first = df.values(), first_dw = dw.values(), first_db = db.values();
        EXPECT_TRUE(same_bits(first, df.values()) && same_bits(first_dw, dw.values()) &&
                    same_bits(first_db, db.values()))
            << what << ": not the same where it is not aligned";
        if constexpr (std::is_same_v<R, P>) {  // in place over ds
          a.f = post ? f.stored.data() : nullptr;
          a.df = ds_at.data();
          ASSERT_EQ(nullptr, residual_bwd_summed(a, kState, kRows, chunks, nullptr, nullptr,
                                                 nullptr, nullptr, nullptr));
          EXPECT_TRUE(same_bits(first, ds_at.values())) << what << ": in place";
        }
      }
      double most = 0;
      for (int64_t r = 0; r < kRows; ++r) {
        const auto f_row = row_of(f.exact, r, cols), grad = row_of(ds.exact, r, cols);
        const NaiveNorm norm(s.post, f_row, kEps);
        const double size = norm_scale(norm, largest(f_row));
        const double scale =
            2 * largest(grad) * (post ? norm.rstd * (1 + largest(w.exact)) * size * size : 1.0);
        const auto want_row = row_of(want, r, cols);
        expect_close(first.data() + r * cols, want_row, scale, cuda_terms(cols), what);
        if (!post) {  // the same elements are dropped
          for (int64_t c = 0; c < cols; ++c) {
            EXPECT_EQ(to_acc(first[r * cols + c]) == 0, want_row[c] == 0) << what;
          }
        }
        most = std::max(most, 2 * largest(grad) * size);
      }
      if (need_dw) {
        expect_close(first_dw.data(), want_dw, kRows * most, cuda_terms(cols), what + ", dw");
      }
      if (need_db) {
        expect_close(first_db.data(), want_db, kRows * most, cuda_terms(cols), what + ", db");
      }
    }
  }
}

TEST(CudaResidualRows, DroppedNaNIsNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const int64_t cols : {33, 64}) {
    std::vector<float> x(size_t(cols), 1.0f), f(size_t(cols), nan), sum = x, df = f;
    ResidualFwd fwd{};
    fwd.cols = cols;
    fwd.r = fwd.p = DType::f32;
    fwd.x = x.data();
    fwd.f = f.data();
    fwd.m = 1;
    fwd.dropout = make_dropout(0.5, 1, cols);
    fwd.sum = sum.data();
    ASSERT_EQ(nullptr, residual_fwd_cuda(fwd, kState, 1, kOneMultiprocessor, nullptr));
    ResidualBwd bwd{};
    bwd.cols = cols;
    bwd.r = bwd.p = DType::f32;
    bwd.ds = f.data();
    bwd.m = 1;
    bwd.dropout = fwd.dropout;
    bwd.df = df.data();
    ASSERT_EQ(nullptr,
              residual_bwd_summed(bwd, kState, 1, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
    const Dropout mask = make_dropout(kState, 0.5, 1, cols);
    for (int64_t c = 0; c < cols; ++c) {
      EXPECT_EQ(mask.keep(0, c), std::isnan(sum[c]));
      EXPECT_EQ(mask.keep(0, c), std::isnan(df[c]));
      EXPECT_TRUE(mask.keep(0, c) || (sum[c] == 1.0f && df[c] == 0.0f));
    }
  }
}

TEST(CudaResidualRows, NoRowsAndOtherPairs) {
  ResidualFwd fwd{};
  fwd.cols = 8;
  fwd.r = fwd.p = DType::f32;
  EXPECT_EQ(nullptr, residual_fwd_cuda(fwd, nullptr, 0, kOneMultiprocessor, nullptr));
  fwd.r = DType::f64;
  EXPECT_NE(nullptr, residual_fwd_cuda(fwd, nullptr, 0, kOneMultiprocessor, nullptr));
  ResidualBwd bwd{};
  bwd.cols = 8;
  bwd.r = bwd.p = DType::f32;
  EXPECT_EQ(nullptr,
            residual_bwd_summed(bwd, nullptr, 0, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
}

}  // namespace
}  // namespace ckptfused
