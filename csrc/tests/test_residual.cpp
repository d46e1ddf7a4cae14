#include "kernels/cpu/residual.h"

#include "kernels/cpu/rows.h"
#include "tests/naive_norm.h"
#include "tests/util.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(bool, residual_fwd, (const ResidualFwd&, int64_t, int64_t, RowScratch&))
CKPT_DECLARE_KERNEL(bool, residual_bwd,
                    (const ResidualBwd&, int64_t, int64_t, void*, void*, RowScratch&))

namespace {

constexpr double kEps = 1e-5;
constexpr int64_t kState[2] = {987654321, 4};
constexpr int64_t kBatch = 2, kTokens = 3, kRows = kBatch * kTokens;

struct Setting {
  NormKind post, next;
  double m, p;
  bool seq_first;
};
constexpr Setting kSettings[] = {
    {NormKind::none, NormKind::none, 1.0, 0.0, false},
    {NormKind::none, NormKind::rmsnorm, 1.0, 0.3, false},
    {NormKind::none, NormKind::layernorm, 0.25, 0.0, true},
    {NormKind::layernorm, NormKind::rmsnorm, 0.5, 0.3, true},
    {NormKind::rmsnorm, NormKind::layernorm, 1.0, 1.0, false},
    {NormKind::layerscale, NormKind::layernorm, 0.5, 0.3, true},
    {NormKind::layerscale, NormKind::none, 1.0, 0.0, true},
};

double row_terms(int64_t n) {
  return 24 + double(n) / 16;
}

RowMap map_of(const Setting& s) {
  RowMap map;
  if (s.seq_first) {
    map.outer = kTokens;
    map.inner = kBatch;
  }
  return map;
}

// m * scale where (row, col) is kept, else 0.
double factor(const Setting& s, const Dropout& d, int64_t row, int64_t col) {
  if (!d.active()) return s.m;
  return d.keep(map_of(s)(row), col) ? s.m * 65536.0 / (65536.0 - d.threshold) : 0.0;
}

size_t scratch_bytes(int64_t cols) {
  return 6 * RowScratch::size<double>(cols) + RowScratch::size<uint16_t>(dropout_buffer_size(cols));
}

template <typename Pair>
class Residual : public testing::Test {};
TYPED_TEST_SUITE(Residual, TypePairs);

template <typename R, typename P, typename O>
void check_forward(const Setting& s, int64_t cols) {
  using A = acc_t<R>;
  const auto x = random_values<R>(kRows * cols, 1);
  const auto f = random_values<P>(kRows * cols, 2);
  const auto post_w = random_values<A>(cols, 3), post_b = random_values<A>(cols, 4);
  const auto next_w = random_values<A>(cols, 5), next_b = random_values<A>(cols, 6);
  for (const auto& kernel : CKPT_KERNELS(residual_fwd)) {
    std::vector<R> sum(size_t(kRows * cols));
    std::vector<O> normed(sum.size()), normed_alone(sum.size());
    ResidualFwd a{};
    a.cols = cols;
    a.r = dtype_of<R>();
    a.p = dtype_of<P>();
    a.x = x.stored.data();
    a.f = f.stored.data();
    a.post = s.post;
    a.next = s.next;
    a.post_eps = a.next_eps = kEps;
    a.post_weight = norm_param(post_w);
    a.post_bias = norm_param(post_b);
    if (s.next != NormKind::none) {
      a.next_weight = norm_param(next_w);
      a.next_bias = norm_param(next_b);
    }
    a.m = s.m;
    a.dropout = make_dropout(kState, s.p, 1, cols);
    a.row_map = map_of(s);
    a.sum = sum.data();
    a.normed = normed.data();
    a.normed_dtype = dtype_of<O>();
    RowScratch scratch(scratch_bytes(cols));
    ASSERT_TRUE(kernel.run(a, 0, kRows, scratch));
    const std::string what = kernel.target + ", width " + std::to_string(cols);
    for (int64_t r = 0; r < kRows; ++r) {
      const auto f_row = row_of(f.exact, r, cols), x_row = row_of(x.exact, r, cols);
      const NaiveNorm post(s.post, f_row, kEps);
      auto want = s.post == NormKind::none ? f_row : post.forward(post_w.exact, post_b.exact);
      double scale = norm_scale(post, largest(f_row)) * largest(post_w.exact) +
                     largest(post_b.exact) + largest(f_row);
      for (int64_t c = 0; c < cols; ++c) {
        want[c] = x_row[c] + want[c] * factor(s, a.dropout, r, c);
      }
      scale = largest(x_row) + 2 * scale;
      expect_close(sum.data() + r * cols, want, scale, row_terms(cols), what);

      // The next norm is of the sum as it was stored.
      std::vector<double> stored;
      for (int64_t c = 0; c < cols; ++c) stored.push_back(double(to_acc(sum[r * cols + c])));
      const NaiveNorm next(s.next, stored, kEps);
      const auto want_normed =
          s.next == NormKind::none ? stored : next.forward(next_w.exact, next_b.exact);
      const double next_scale =
          norm_scale(next, largest(stored)) * largest(next_w.exact) + largest(next_b.exact);
      expect_close(normed.data() + r * cols, want_normed, next_scale, row_terms(cols),
                   what + ", normed");
    }
    // Without the sum the normed rows are the same, bit for bit.
    a.sum = nullptr;
    a.normed = normed_alone.data();
    RowScratch again(scratch_bytes(cols));
    ASSERT_TRUE(kernel.run(a, 0, kRows, again));
    EXPECT_EQ(0, memcmp(normed.data(), normed_alone.data(), normed.size() * sizeof(O))) << what;
  }
}

TYPED_TEST(Residual, ForwardMatchesDefinition) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  for (const Setting& s : kSettings) {
    for (const int64_t cols : odd_widths()) {
      check_forward<R, P, P>(s, cols);
      if constexpr (!std::is_same_v<R, P>) check_forward<R, P, R>(s, cols);
    }
  }
}

TYPED_TEST(Residual, BackwardMatchesJacobian) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  for (const Setting& s : kSettings) {
    for (const int64_t cols : {1, 2, 7, 33, 64, 257}) {
      const auto ds = random_values<R>(kRows * cols, 1);
      const auto f = random_values<P>(kRows * cols, 2);
      const auto w = random_values<A>(cols, 3);
      for (const auto& kernel : CKPT_KERNELS(residual_bwd)) {
        std::vector<P> df = f.stored;  // in place over f
        std::vector<A> dw(size_t(cols), A(0)), db(size_t(cols), A(0));
        ResidualBwd a{};
        a.cols = cols;
        a.r = dtype_of<R>();
        a.p = dtype_of<P>();
        a.ds = ds.stored.data();
        a.f = a.df = df.data();
        a.post = s.post;
        a.post_eps = kEps;
        a.post_weight = norm_param(w);
        a.m = s.m;
        a.dropout = make_dropout(kState, s.p, 3, cols);
        a.row_map = map_of(s);
        RowScratch scratch(scratch_bytes(cols));
        ASSERT_TRUE(kernel.run(a, 0, kRows, dw.data(), db.data(), scratch));

        const std::string what = kernel.target + ", width " + std::to_string(cols);
        std::vector<double> want_dw(size_t(cols), 0.0), want_db(size_t(cols), 0.0);
        double most = 0;
        for (int64_t r = 0; r < kRows; ++r) {
          const auto f_row = row_of(f.exact, r, cols);
          auto grad = row_of(ds.exact, r, cols);
          for (int64_t c = 0; c < cols; ++c) grad[c] *= factor(s, a.dropout, r, c);
          const NaiveNorm post(s.post, f_row, kEps);
          const double size = norm_scale(post, largest(f_row));
          if (s.post == NormKind::none) {
            expect_close(df.data() + r * cols, grad, largest(grad), 4, what);
            continue;
          }
          for (int64_t c = 0; c < cols; ++c) {
            want_dw[c] += grad[c] * post.xhat[c];
            want_db[c] += grad[c];
          }
          const double scale = post.rstd * largest(w.exact) * largest(grad) * size * size;
          expect_close(df.data() + r * cols, post.backward(grad, w.exact), scale, row_terms(cols),
                       what);
          most = std::max(most, largest(grad) * size);
        }
        expect_close(dw.data(), want_dw, kRows * most, row_terms(cols), what + ", dw");
        expect_close(db.data(), want_db, kRows * most, row_terms(cols), what + ", db");
      }
    }
  }
}

TEST(ResidualRows, GradientOverItsInput) {
  const int64_t cols = 111;
  const auto ds = random_values<bf16>(kRows * cols, 1);
  std::vector<bf16> apart(ds.stored.size()), in_place = ds.stored;
  ResidualBwd a{};
  a.cols = cols;
  a.r = a.p = DType::bf16;
  a.m = 0.5;
  a.dropout = make_dropout(kState, 0.2, 3, cols);
  a.ds = ds.stored.data();
  a.df = apart.data();
  ASSERT_TRUE(residual_bwd_rows(a, 0, kRows, nullptr, nullptr));
  a.ds = a.df = in_place.data();
  ASSERT_TRUE(residual_bwd_rows(a, 0, kRows, nullptr, nullptr));
  EXPECT_EQ(0, memcmp(apart.data(), in_place.data(), apart.size() * sizeof(bf16)));
}

TEST(ResidualRows, RefusesOtherPairs) {
  ResidualFwd a{};
  a.r = DType::f64;
  a.p = DType::f32;
  EXPECT_FALSE(residual_fwd_rows(a, 0, 0));
}

}  // namespace
}  // namespace ckptfused
