#include "kernels/cpu/norm.h"

#include <limits>

#include "kernels/cpu/rows.h"
#include "tests/naive_norm.h"
#include "tests/util.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(bool, norm_fwd, (const NormFwd&, int64_t, int64_t, RowScratch&))
CKPT_DECLARE_KERNEL(bool, norm_bwd, (const NormBwd&, int64_t, int64_t, void*, void*, RowScratch&))

namespace {

constexpr double kEps = 1e-5;
constexpr NormKind kKinds[] = {NormKind::layernorm, NormKind::rmsnorm};

// Roundings that sums over a row of n make: one a step of a lane, and a few around it.
double row_terms(int64_t n) {
  return 16 + double(n) / 16;
}

template <typename Pair>
class Norm : public testing::Test {};
TYPED_TEST_SUITE(Norm, TypePairs);

TYPED_TEST(Norm, ForwardMatchesDefinition) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  for (const int64_t cols : odd_widths()) {
    const int64_t rows = 3;
    const auto x = random_values<R>(rows * cols, 1);
    const auto w = random_values<A>(cols, 2), b = random_values<A>(cols, 3);
    for (const auto& kernel : CKPT_KERNELS(norm_fwd)) {
      for (const NormKind kind : kKinds) {
        for (const bool bias : {false, true}) {
          std::vector<P> y(size_t(rows * cols));
          NormFwd a{kind,          kEps,
                    cols,          dtype_of<R>(),
                    dtype_of<P>(), x.stored.data(),
                    norm_param(w), bias ? norm_param(b) : NormParam{},
                    y.data()};
          RowScratch scratch(3 * RowScratch::size<A>(cols));
          ASSERT_TRUE(kernel.run(a, 0, rows, scratch));
          for (int64_t r = 0; r < rows; ++r) {
            const auto row = row_of(x.exact, r, cols);
            const NaiveNorm norm(kind, row, kEps);
            const auto want = norm.forward(w.exact, bias ? b.exact : std::vector<double>());
            const double scale =
                norm_scale(norm, largest(row)) * largest(w.exact) + (bias ? largest(b.exact) : 0);
            expect_close(y.data() + r * cols, want, scale, row_terms(cols),
                         kernel.target + ", width " + std::to_string(cols));
          }
        }
      }
    }
  }
}

TYPED_TEST(Norm, BackwardMatchesJacobian) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  for (const int64_t cols : {1, 2, 7, 33, 64, 257}) {
    const int64_t rows = 3;
    const auto x = random_values<R>(rows * cols, 1), dres = random_values<R>(rows * cols, 4);
    const auto dy = random_values<P>(rows * cols, 5);
    const auto w = random_values<A>(cols, 2);
    for (const auto& kernel : CKPT_KERNELS(norm_bwd)) {
      for (const NormKind kind : kKinds) {
        for (const bool residual : {false, true}) {
          // In place over dres, where there is one.
          std::vector<R> dx = residual ? dres.stored : std::vector<R>(size_t(rows * cols));
          std::vector<A> dw(size_t(cols), A(0)), db(size_t(cols), A(0));
          NormBwd a{kind,
                    kEps,
                    cols,
                    dtype_of<R>(),
                    dtype_of<P>(),
                    dy.stored.data(),
                    x.stored.data(),
                    norm_param(w),
                    residual ? dx.data() : nullptr,
                    dx.data()};
          RowScratch scratch(3 * RowScratch::size<A>(cols));
          ASSERT_TRUE(kernel.run(a, 0, rows, dw.data(), db.data(), scratch));

          std::vector<double> want_dw(size_t(cols), 0.0), want_db(size_t(cols), 0.0);
          const std::string what = kernel.target + ", width " + std::to_string(cols);
          double most = 0;
          for (int64_t r = 0; r < rows; ++r) {
            const auto row = row_of(x.exact, r, cols), grad = row_of(dy.exact, r, cols);
            const NaiveNorm norm(kind, row, kEps);
            auto want = norm.backward(grad, w.exact);
            for (int64_t c = 0; c < cols; ++c) {
              if (residual) want[c] += dres.exact[r * cols + c];
              want_dw[c] += grad[c] * norm.xhat[c];
              want_db[c] += grad[c];
            }
            const double size = norm_scale(norm, largest(row));
            const double scale = norm.rstd * largest(w.exact) * largest(grad) * size * size;
            expect_close(dx.data() + r * cols, want, scale + largest(want), row_terms(cols), what);
            most = std::max(most, largest(grad) * size);
          }
          expect_close(dw.data(), want_dw, rows * most, row_terms(cols), what + ", dw");
          expect_close(db.data(), want_db, rows * most, row_terms(cols), what + ", db");
        }
      }
    }
  }
}

TYPED_TEST(Norm, InPlaceIsTheSame) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  if constexpr (std::is_same_v<R, P>) {
    const int64_t rows = 5, cols = 111;
    const auto x = random_values<R>(rows * cols, 1), dy = random_values<R>(rows * cols, 2);
    const auto w = random_values<A>(cols, 3);
    std::vector<R> y(size_t(rows * cols)), dx = y, y_in_place = x.stored, dx_in_place = dy.stored;
    NormFwd fwd{NormKind::layernorm, kEps,          cols, dtype_of<R>(), dtype_of<R>(),
                x.stored.data(),     norm_param(w), {},   y.data()};
    ASSERT_TRUE(norm_fwd_rows(fwd, 0, rows));
    fwd.x = fwd.y = y_in_place.data();
    ASSERT_TRUE(norm_fwd_rows(fwd, 0, rows));
    EXPECT_EQ(0, memcmp(y.data(), y_in_place.data(), y.size() * sizeof(R)));

    NormBwd bwd{
        NormKind::layernorm, kEps,          cols,    dtype_of<R>(), dtype_of<R>(), dy.stored.data(),
        x.stored.data(),     norm_param(w), nullptr, dx.data()};
    ASSERT_TRUE(norm_bwd_rows(bwd, 0, rows, nullptr, nullptr));
    bwd.dy = bwd.dx = dx_in_place.data();
    ASSERT_TRUE(norm_bwd_rows(bwd, 0, rows, nullptr, nullptr));
    EXPECT_EQ(0, memcmp(dx.data(), dx_in_place.data(), dx.size() * sizeof(R)));
  }
}

TEST(NormRows, NaNStaysInItsRow) {
  const int64_t rows = 3, cols = 40;
  auto x = random_values<float>(rows * cols, 1).stored;
  x[cols + 17] = std::numeric_limits<float>::quiet_NaN();
  std::vector<bf16> y(size_t(rows * cols));
  const NormFwd a{
      NormKind::layernorm, kEps, cols, DType::f32, DType::bf16, x.data(), {}, {}, y.data()};
  ASSERT_TRUE(norm_fwd_rows(a, 0, rows));
  for (int64_t i = 0; i < rows * cols; ++i) {
    EXPECT_EQ(std::isnan(to_acc(y[i])), i / cols == 1) << i;
  }
}

TEST(NormRows, KindNoneConverts) {
  const auto x = random_values<float>(70, 1);
  std::vector<f16> y(70);
  const NormFwd a{NormKind::none,  kEps, 70, DType::f32, DType::f16,
                  x.stored.data(), {},   {}, y.data()};
  ASSERT_TRUE(norm_fwd_rows(a, 0, 1));
  for (int i = 0; i < 70; ++i) EXPECT_EQ(y[i].bits, store<f16>(x.exact[i]).bits);
}

// A weight is read in the type that the model holds it in, and Gemma's norm adds 1 in the
// accumulation type.
template <typename W, typename A>
void check_param_type() {
  const int64_t rows = 4, cols = 111;
  const auto x = random_values<A>(rows * cols, 1);
  const auto w = random_values<W>(cols, 2), b = random_values<W>(cols, 3);
  for (const NormKind kind : {NormKind::layernorm, NormKind::gemma}) {
    Values<A> gain, shift;
    for (int64_t c = 0; c < cols; ++c) {
      gain.stored.push_back(A(to_acc(w.stored[c])));
      shift.stored.push_back(A(to_acc(b.stored[c])));
      if (kind == NormKind::gemma) gain.stored.back() += A(1);
    }
    std::vector<A> got(size_t(rows * cols)), want(got.size()), dx(got.size()), want_dx(got.size());
    const DType dtype = dtype_of<A>();
    NormFwd fwd{kind,          kEps,          cols,      dtype, dtype, x.stored.data(),
                norm_param(w), norm_param(b), got.data()};
    NormBwd bwd{kind,          kEps,    cols,     dtype, dtype, x.stored.data(), x.stored.data(),
                norm_param(w), nullptr, dx.data()};
    ASSERT_TRUE(norm_fwd_rows(fwd, 0, rows) && norm_bwd_rows(bwd, 0, rows, nullptr, nullptr));
    // Gemma's is an RMS norm by another weight.
    fwd.kind = bwd.kind = kind == NormKind::gemma ? NormKind::rmsnorm : kind;
    fwd.weight = bwd.weight = norm_param(gain);
    fwd.bias = norm_param(shift);
    fwd.y = want.data();
    bwd.dx = want_dx.data();
    ASSERT_TRUE(norm_fwd_rows(fwd, 0, rows) && norm_bwd_rows(bwd, 0, rows, nullptr, nullptr));
    EXPECT_EQ(0, memcmp(got.data(), want.data(), got.size() * sizeof(A)));
    EXPECT_EQ(0, memcmp(dx.data(), want_dx.data(), dx.size() * sizeof(A)));
  }
}

TEST(NormRows, ParametersOfAnyType) {
  check_param_type<bf16, float>();
  check_param_type<f16, float>();
  check_param_type<float, double>();
  check_param_type<double, double>();
  check_param_type<double, float>();
}

TEST(NormRows, NoWeightIsOnes) {
  const int64_t cols = 33;
  const auto x = random_values<float>(cols, 1);
  Values<float> ones;
  ones.stored.assign(size_t(cols), 1.0f);
  std::vector<float> got(33), want(33);
  for (const NormKind kind : {NormKind::rmsnorm, NormKind::gemma}) {
    NormFwd a{kind, kEps, cols, DType::f32, DType::f32, x.stored.data(), {}, {}, got.data()};
    ASSERT_TRUE(norm_fwd_rows(a, 0, 1));
    a.kind = NormKind::rmsnorm;
    a.weight = norm_param(ones);
    a.y = want.data();
    ASSERT_TRUE(norm_fwd_rows(a, 0, 1));
    EXPECT_EQ(0, memcmp(got.data(), want.data(), got.size() * sizeof(float)));
  }
}

TEST(NormRows, RefusesOtherPairs) {
  NormFwd a{};
  a.r = DType::bf16;
  a.p = DType::f32;
  EXPECT_FALSE(norm_fwd_rows(a, 0, 0));
}

TEST(RowChunks, CoverRowsAndStayFew) {
  for (const int64_t rows : {0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 1000003}) {
    const RowChunks chunks{rows, cpu_grad_chunks(rows)};
    EXPECT_LE(chunks.count, 64);
    int64_t next = 0;
    for (int64_t c = 0; c < chunks.count; ++c) {
      EXPECT_EQ(chunks.begin(c), next);
      EXPECT_GT(chunks.end(c), next);
      next = chunks.end(c);
    }
    EXPECT_EQ(next, rows);
  }
}

// Each sum in its chunks' order, rounded once to the parameter's type.
template <typename A, typename T>
void check_sum_grads() {
  const int64_t count = 5, cols = 1100, begin = 3, end = 1090;
  const auto parts = random_values<A>(count * cols, 1);
  const std::vector<T> before(size_t(cols), store<T>(-1.0));
  std::vector<T> out = before;
  const GradSum sum{parts.stored.data(), out.data(), count, cols, dtype_of<T>()};
  sum_grads_cols(sum, dtype_of<A>(), begin, end);
  for (int64_t c = 0; c < cols; ++c) {
    A total = 0;
    for (int64_t k = 0; k < count; ++k) total += parts.stored[k * cols + c];
    T want = before[0];
    if (c >= begin && c < end) from_acc(acc_t<T>(total), want);
    EXPECT_EQ(0, std::memcmp(&want, &out[c], sizeof want)) << c;
  }
}

TEST(SumGrads, AddsInOrder) {
  check_sum_grads<float, float>();
  check_sum_grads<float, bf16>();
  check_sum_grads<float, f16>();
  check_sum_grads<float, double>();
  check_sum_grads<double, double>();
}

}  // namespace
}  // namespace ckptfused
