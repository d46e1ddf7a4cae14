#include "kernels/cuda/norm.h"

#include <limits>

#include "kernels/cpu/norm.h"
#include "tests/cuda/rows_util.h"
#include "tests/naive_norm.h"

namespace ckptfused {
namespace {

constexpr double kEps = 1e-5;
constexpr NormKind kKinds[] = {NormKind::layernorm, NormKind::rmsnorm, NormKind::gemma};
constexpr DType kParamTypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

template <typename Pair>
class CudaNorm : public testing::Test {};
TYPED_TEST_SUITE(CudaNorm, CudaTypePairs);

// Every width with every kind; dtype and presence of the parameters take turns.
TYPED_TEST(CudaNorm, ForwardMatchesDefinition) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  int turn = 0;
  for (const int64_t cols : cuda_widths()) {
    const int64_t rows = cols < 2000 && !kThreadSanitizer ? 5 : 2;
    const auto x = random_values<R>(rows * cols, 1);
    for (const NormKind kind : kKinds) {
      // The compute dtype first, as models have it, then others.
      const DType dtype = turn % 2 == 0 ? dtype_of<P>() : kParamTypes[turn / 2 % 4];
      const Param w(dtype, cols, 2), b(dtype, cols, 3);
      const bool weight = turn % 5 != 3, bias = turn % 3 != 2;
      ++turn;
      const auto gain = weight ? w.gain(kind) : std::vector<double>(size_t(cols), 1.0);
      const std::string what = "width " + std::to_string(cols) + ", turn " + std::to_string(turn);
      std::vector<P> aligned, cpu(x.stored.size());
      for (const bool align : {true, false}) {
        Placed<R> x_at(x.stored, align);
        Placed<P> y(size_t(rows * cols), align);
        NormFwd a{kind,
                  kEps,
                  cols,
                  dtype_of<R>(),
                  dtype_of<P>(),
                  x_at.data(),
                  weight ? w.param : NormParam{},
                  bias ? b.param : NormParam{},
                  y.data()};
        const int64_t multiprocessors = align ? kOneMultiprocessor : kManyMultiprocessors;
        ASSERT_EQ(nullptr, norm_fwd_cuda(a, rows, multiprocessors, nullptr));
        EXPECT_TRUE(y.guards_untouched()) << what;
        const auto got = y.values();
        if (align) aligned = got;
        EXPECT_TRUE(same_bits(aligned, got)) << what << ": not the same where it is not aligned";
        a.y = cpu.data();
        ASSERT_TRUE(norm_fwd_rows(a, 0, rows));
        for (int64_t r = 0; r < rows; ++r) {
          const auto row = row_of(x.exact, r, cols);
          const NaiveNorm norm(kind, row, kEps);
          const auto want = norm.forward(gain, bias ? b.exact : std::vector<double>());
          const double scale =
              norm_scale(norm, largest(row)) * largest(gain) + (bias ? largest(b.exact) : 0);
          expect_close(got.data() + r * cols, want, scale, cuda_terms(cols), what);
          expect_alike(got.data() + r * cols, cpu.data() + r * cols, size_t(cols), scale,
                       cuda_terms(cols), what + ", CPU");
        }
      }
    }
  }
}

// The gradient in double precision: by the Jacobian where that is quick, by the CPU kernel else.
struct WantedGrad {
  std::vector<double> dx, dw, db;
};
WantedGrad wanted(NormKind kind, int64_t rows, int64_t cols, const std::vector<double>& x,
                  const std::vector<double>& dy, const std::vector<double>& gain,
                  const std::vector<double>& dres) {
  WantedGrad want{std::vector<double>(x.size()), std::vector<double>(size_t(cols)),
                  std::vector<double>(size_t(cols))};
  const NormKind plain = kind == NormKind::gemma ? NormKind::rmsnorm : kind;  // 1 is in the gain
  if (cols > 257) {
    const NormBwd a{plain,
                    kEps,
                    cols,
                    DType::f64,
                    DType::f64,
                    dy.data(),
                    x.data(),
                    NormParam{gain.data(), DType::f64},
                    dres.empty() ? nullptr : dres.data(),
                    want.dx.data()};
    EXPECT_TRUE(norm_bwd_rows(a, 0, rows, want.dw.data(), want.db.data()));
    return want;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const auto grad = row_of(dy, r, cols);
    const NaiveNorm norm(plain, row_of(x, r, cols), kEps);
    const auto dx = norm.backward(grad, gain);
    for (int64_t c = 0; c < cols; ++c) {
      want.dx[r * cols + c] = dx[c] + (dres.empty() ? 0 : dres[r * cols + c]);
      want.dw[c] += grad[c] * norm.xhat[c];
      want.db[c] += grad[c];
    }
  }
  return want;
}

TYPED_TEST(CudaNorm, BackwardMatchesJacobian) {
  using R = typename TypeParam::R;
  using P = typename TypeParam::P;
  using A = acc_t<R>;
  int turn = 0;
  for (const int64_t cols : cuda_widths()) {
    const int64_t rows = cols < 2000 && !kThreadSanitizer ? 5 : 3;
    const auto x = random_values<R>(rows * cols, 1), dres = random_values<R>(rows * cols, 4);
    const auto dy = random_values<P>(rows * cols, 5);
    for (const NormKind kind : kKinds) {
      const DType dtype = turn % 2 == 0 ? dtype_of<P>() : kParamTypes[turn / 2 % 4];
      const Param w(dtype, cols, 2);
      const bool weight = turn % 5 != 3, residual = turn % 3 != 0;
      const bool need_dw = turn % 7 != 5, need_db = kind == NormKind::layernorm || turn % 4 == 3;
      const int64_t chunks = 1 + turn % 4;
      const bool in_place = turn % 2 == 0;
      ++turn;
      const auto gain = weight ? w.gain(kind) : std::vector<double>(size_t(cols), 1.0);
      const auto want = wanted(kind, rows, cols, x.exact, dy.exact, gain,
                               residual ? dres.exact : std::vector<double>());
      const std::string what = "width " + std::to_string(cols) + ", turn " + std::to_string(turn);
      std::vector<R> aligned, cpu(x.stored.size());
      std::vector<A> aligned_dw, aligned_db;
      for (const bool align : {true, false}) {
        Placed<R> x_at(x.stored, align), dres_at(dres.stored, align), dx(x.stored.size(), align);
        Placed<P> dy_at(dy.stored, align);
        Placed<A> dw(size_t(cols), align), db(size_t(cols), align);
        std::vector<A> scratch(size_t(2 * chunks * cols), std::numeric_limits<A>::quiet_NaN());
        std::vector<A> cpu_dw(size_t(cols), A(0)), cpu_db = cpu_dw;
        Placed<R>& out = residual && in_place ? dres_at : dx;
        NormBwd a{kind,
                  kEps,
                  cols,
                  dtype_of<R>(),
                  dtype_of<P>(),
                  dy_at.data(),
                  x_at.data(),
                  weight ? w.param : NormParam{},
                  residual ? dres_at.data() : nullptr,
                  cpu.data()};
        ASSERT_TRUE(norm_bwd_rows(a, 0, rows, cpu_dw.data(), cpu_db.data()));
        a.dx = out.data();
        ASSERT_EQ(nullptr, norm_bwd_summed(a, rows, chunks, need_dw ? scratch.data() : nullptr,
                                           need_db ? scratch.data() + chunks * cols : nullptr,
                                           need_dw ? dw.data() : nullptr,
                                           need_db ? db.data() : nullptr, nullptr));
        EXPECT_TRUE(out.guards_untouched() && dw.guards_untouched() && db.guards_untouched())
            << what;
        const auto got = out.values();
        if (align) aligned = got, aligned_dw = dw.values(), aligned_db = db.values();
        EXPECT_TRUE(same_bits(aligned, got) && same_bits(aligned_dw, dw.values()) &&
                    same_bits(aligned_db, db.values()))
            << what << ": not the same where it is not aligned";
        double most = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const auto row = row_of(x.exact, r, cols), grad = row_of(dy.exact, r, cols);
          const NaiveNorm norm(kind, row, kEps);
          const double size = norm_scale(norm, largest(row));
          const auto want_row = row_of(want.dx, r, cols);
          const double scale = norm.rstd * largest(gain) * largest(grad) * size * size;
          const double entry = scale + largest(want_row);
          expect_close(got.data() + r * cols, want_row, entry, cuda_terms(cols), what);
          expect_alike(got.data() + r * cols, cpu.data() + r * cols, size_t(cols), entry,
                       cuda_terms(cols), what + ", CPU");
          most = std::max(most, largest(grad) * size);
        }
        const auto check = [&](Placed<A>& grad, const std::vector<double>& wanted,
                               const std::vector<A>& cpu_grad, const std::string& name) {
          expect_close(grad.data(), wanted, rows * most, cuda_terms(cols), name);
          expect_alike(grad.data(), cpu_grad.data(), size_t(cols), rows * most, cuda_terms(cols),
                       name + ", CPU");
        };
        if (need_dw) check(dw, want.dw, cpu_dw, what + ", dw");
        if (need_db) check(db, want.db, cpu_db, what + ", db");
      }
    }
  }
}

TYPED_TEST(CudaNorm, InPlaceIsTheSame) {
  using R = typename TypeParam::R;
  for (const int64_t cols : {33, 64, 1024}) {
    const int64_t rows = 3;
    const auto x = random_values<R>(rows * cols, 1), dy = random_values<R>(rows * cols, 2);
    Placed<R> y(x.stored.size(), true), over_x(x.stored, true), dx(x.stored.size(), true),
        over_dy(dy.stored, true), x_at(x.stored, true), dy_at(dy.stored, true);
    NormFwd fwd{NormKind::layernorm, kEps, cols, dtype_of<R>(), dtype_of<R>(),
                x_at.data(),         {},   {},   y.data()};
    ASSERT_EQ(nullptr, norm_fwd_cuda(fwd, rows, kOneMultiprocessor, nullptr));
    fwd.x = fwd.y = over_x.data();
    ASSERT_EQ(nullptr, norm_fwd_cuda(fwd, rows, kOneMultiprocessor, nullptr));
    EXPECT_TRUE(same_bits(y.values(), over_x.values()));

    NormBwd bwd{NormKind::layernorm, kEps,        cols,        dtype_of<R>(), dtype_of<R>(),
                dy_at.data(),        x_at.data(), NormParam{}, nullptr,       dx.data()};
    ASSERT_EQ(nullptr, norm_bwd_summed(bwd, rows, 2, nullptr, nullptr, nullptr, nullptr, nullptr));
    bwd.dy = bwd.dx = over_dy.data();
    ASSERT_EQ(nullptr, norm_bwd_summed(bwd, rows, 2, nullptr, nullptr, nullptr, nullptr, nullptr));
    EXPECT_TRUE(same_bits(dx.values(), over_dy.values()));
  }
}

TEST(CudaNormRows, NoRowsGiveZeroGradients) {
  const int64_t cols = 40;
  for (const bool bias : {false, true}) {
    std::vector<float> dw(size_t(cols), -1.0f), db(size_t(cols), -1.0f), scratch(2 * size_t(cols));
    NormBwd a{};
    a.kind = NormKind::rmsnorm;
    a.cols = cols;
    a.r = a.p = DType::bf16;
    const int64_t chunks = row_grad_chunks(0, cols, 132);
    ASSERT_EQ(1, chunks);
    scratch.assign(scratch.size(), std::numeric_limits<float>::quiet_NaN());
    ASSERT_EQ(nullptr,
              norm_bwd_summed(a, 0, chunks, scratch.data(), bias ? scratch.data() + cols : nullptr,
                              dw.data(), bias ? db.data() : nullptr, nullptr));
    for (int64_t c = 0; c < cols; ++c) {
      EXPECT_EQ(0.0f, dw[c]);
      EXPECT_EQ(bias ? 0.0f : -1.0f, db[c]);
    }
    NormFwd fwd{};
    fwd.cols = cols;
    fwd.r = fwd.p = DType::bf16;
    EXPECT_EQ(nullptr, norm_fwd_cuda(fwd, 0, kOneMultiprocessor, nullptr));
  }
}

TEST(CudaNormRows, OneChunkOrManyOneRowOrMany) {
  // Rows that do not divide evenly, and more chunks than rows.
  const int64_t cols = 72;
  for (const int64_t rows : {1, 7}) {
    const auto x = random_values<float>(rows * cols, 1), dy = random_values<float>(rows * cols, 2);
    const auto want = wanted(NormKind::layernorm, rows, cols, x.exact, dy.exact,
                             std::vector<double>(size_t(cols), 1.0), {});
    for (const int64_t chunks : {1, 3, 7, 35}) {
      std::vector<float> dw(cols), db(cols), scratch(size_t(2 * chunks * cols));
      scratch.assign(scratch.size(), std::numeric_limits<float>::quiet_NaN());
      NormBwd a{NormKind::layernorm, kEps,        cols,    DType::f32, DType::f32, dy.stored.data(),
                x.stored.data(),     NormParam{}, nullptr, nullptr};
      ASSERT_EQ(nullptr,
                norm_bwd_summed(a, rows, chunks, scratch.data(), scratch.data() + chunks * cols,
                                dw.data(), db.data(), nullptr));
      expect_close(dw.data(), want.dw, 30 * double(rows), 24, "dw");
      expect_close(db.data(), want.db, 10 * double(rows), 24, "db");
    }
  }
}

TEST(CudaNormRows, NaNStaysInItsRow) {
  for (const int64_t cols : {39, 40}) {
    const int64_t rows = 3;
    auto x = random_values<float>(rows * cols, 1).stored;
    x[cols + 17] = std::numeric_limits<float>::quiet_NaN();
    std::vector<bf16> y(size_t(rows * cols));
    const NormFwd a{
        NormKind::layernorm, kEps, cols, DType::f32, DType::bf16, x.data(), {}, {}, y.data()};
    ASSERT_EQ(nullptr, norm_fwd_cuda(a, rows, kOneMultiprocessor, nullptr));
    for (int64_t i = 0; i < rows * cols; ++i) {
      EXPECT_EQ(std::isnan(to_acc(y[i])), i / cols == 1) << i;
    }
  }
}

TEST(CudaNormRows, KindNoneConverts) {
  for (const int64_t cols : {70, 72}) {
    const auto x = random_values<float>(cols, 1), dres = random_values<float>(cols, 2);
    std::vector<f16> y(cols);
    NormFwd fwd{NormKind::none,  kEps, cols, DType::f32, DType::f16,
                x.stored.data(), {},   {},   y.data()};
    ASSERT_EQ(nullptr, norm_fwd_cuda(fwd, 1, kOneMultiprocessor, nullptr));
    for (int i = 0; i < cols; ++i) EXPECT_EQ(y[i].bits, store<f16>(x.exact[i]).bits);

    std::vector<float> dx(cols);
    NormBwd bwd{NormKind::none, kEps,    cols, DType::f32,         DType::f16,
                y.data(),       nullptr, {},   dres.stored.data(), dx.data()};
    ASSERT_EQ(nullptr, norm_bwd_summed(bwd, 1, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
    for (int i = 0; i < cols; ++i) EXPECT_EQ(dx[i], dres.stored[i] + to_acc(y[i]));
  }
}

TEST(CudaNormRows, RefusesOtherPairs) {
  NormFwd a{};
  a.r = DType::bf16;
  a.p = DType::f32;
  EXPECT_NE(nullptr, norm_fwd_cuda(a, 0, kOneMultiprocessor, nullptr));
}

TEST(CudaNormRows, ChunksFillTheChipAndStayFew) {
  for (const int64_t cols : {1, 64, 1024, 4096, 16384, 20000}) {
    for (const int64_t rows : {0, 1, 7, 100, 16384, 10000000}) {
      const int64_t chunks = row_grad_chunks(rows, cols, 132);
      EXPECT_GE(chunks, 1);
      EXPECT_LE(chunks, std::max<int64_t>(1, (rows + 7) / 8));
      EXPECT_LE(chunks, 132 * 32);
    }
  }
  EXPECT_EQ(264, row_grad_chunks(16384, 4096, 132));
}

}  // namespace
}  // namespace ckptfused
