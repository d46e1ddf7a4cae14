#include "kernels/cpu/qk.h"

#include <cstring>

#include "kernels/cpu/rows.h"
#include "tests/naive_norm.h"
#include "tests/naive_rope.h"
#include "tests/util.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(void, qk_fwd, (const QkFwd&, int64_t, int64_t, RowScratch&))
CKPT_DECLARE_KERNEL(void, qk_bwd, (const QkBwd&, int64_t, int64_t, void*, void*, RowScratch&))

namespace {

constexpr double kEps = 1e-5;
constexpr NormKind kNorms[] = {NormKind::none, NormKind::layernorm, NormKind::rmsnorm};
constexpr RopeKind kRopes[] = {RopeKind::none, RopeKind::half, RopeKind::interleaved};

// Heads in the middle of a packed [B, T, (H + 2) * D] product, so that no stride is that of a
// contiguous tensor.
template <typename T>
struct Problem {
  using A = acc_t<T>;
  static constexpr int64_t kBatch = 2, kTime = 3, kHeads = 3;
  int64_t dim, rotary, row_stride;
  NormKind norm;
  QkShape shape{};
  Values<T> x, dy;
  Values<A> weight, bias, cos, sin;

  Problem(int64_t dim, int64_t rotary, NormKind norm, RopeKind rope, bool shared_angles)
      : dim(dim),
        rotary(rope == RopeKind::none ? 0 : rotary),
        row_stride((kHeads + 2) * dim),
        norm(norm) {
    x = random_values<T>(kBatch * kTime * row_stride, 1);
    dy = random_values<T>(kBatch * kTime * row_stride, 2);
    weight = random_values<A>(dim, 3);
    bias = random_values<A>(dim, 4);
    cos = random_values<A>(kBatch * kTime * rotary / 2, 5);
    sin = random_values<A>(kBatch * kTime * rotary / 2, 6);
    shape = {dtype_of<T>(),
             norm,
             kEps,
             rope,
             kTime,
             kHeads,
             dim,
             this->rotary,
             norm_param(weight),
             cos.stored.data(),
             sin.stored.data(),
             shared_angles ? 0 : kTime * rotary / 2};
  }

  template <typename Pointer>
  HeadsView<Pointer> view(Pointer data) const {
    using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const T, T>;
    return {static_cast<Element*>(data) + dim, kTime * row_stride, row_stride, dim};
  }
  int64_t offset(int64_t token, int64_t h) const { return token * row_stride + (1 + h) * dim; }
  std::vector<double> head(const std::vector<double>& v, int64_t token, int64_t h) const {
    return {v.begin() + offset(token, h), v.begin() + offset(token, h) + dim};
  }

  std::vector<double> rotated(const std::vector<double>& v, int64_t token, bool transposed) const {
    const int64_t half = rotary / 2;
    const int64_t row = shape.cos_batch_stride == 0 ? token % kTime : token;
    return naive_rope(v, shape.rope, cos.exact.data() + row * half, sin.exact.data() + row * half,
                      half, transposed);
  }
  double angle_scale() const { return rotary == 0 ? 1 : largest(cos.exact) + largest(sin.exact); }
  double terms() const { return 24 + double(dim) / 16; }

  // Everything outside the heads is as before.
  void expect_rest_untouched(const std::vector<T>& got, const std::vector<T>& before) const {
    for (int64_t token = 0; token < kBatch * kTime; ++token) {
      const int64_t start = token * row_stride, end = start + (1 + kHeads) * dim;
      ASSERT_EQ(0, std::memcmp(&got[start], &before[start], size_t(dim) * sizeof(T)));
      ASSERT_EQ(0, std::memcmp(&got[end], &before[end], size_t(dim) * sizeof(T)));
    }
  }
};

template <typename T, typename F>
void for_problems(F f) {
  const int64_t dims[][2] = {{2, 2}, {6, 4}, {37, 22}, {64, 64}, {80, 32}, {128, 128}};
  for (const auto& [dim, rotary] : dims) {
    for (const NormKind norm : kNorms) {
      for (const RopeKind rope : kRopes) f(Problem<T>(dim, rotary, norm, rope, dim % 4 == 0));
    }
  }
}

template <typename T>
class QkTest : public testing::Test {};
using StorageTypes = testing::Types<double, float, bf16, f16>;
TYPED_TEST_SUITE(QkTest, StorageTypes);

TYPED_TEST(QkTest, ForwardMatchesDefinition) {
  using T = TypeParam;
  for_problems<T>([](const Problem<T>& p) {
    for (const auto& kernel : CKPT_KERNELS(qk_fwd)) {
      for (const bool bias : {false, true}) {
        std::vector<T> y = p.dy.stored, in_place = p.x.stored;
        QkFwd a{p.shape, bias ? norm_param(p.bias) : NormParam{},
                p.view(static_cast<const void*>(p.x.stored.data())),
                p.view(static_cast<void*>(y.data()))};
        RowScratch scratch(3 * RowScratch::size<double>(p.dim)),
            again(3 * RowScratch::size<double>(p.dim));
        kernel.run(a, 0, p.kBatch * p.kTime, scratch);
        a.y = p.view(static_cast<void*>(in_place.data()));
        a.x = {a.y.data, a.y.batch_stride, a.y.time_stride, a.y.head_stride};
        kernel.run(a, 0, p.kBatch * p.kTime, again);

        for (int64_t token = 0; token < p.kBatch * p.kTime; ++token) {
          for (int64_t h = 0; h < p.kHeads; ++h) {
            auto want = p.head(p.x.exact, token, h);
            double scale = largest(want);
            if (p.norm != NormKind::none) {
              const NaiveNorm norm(p.norm, want, kEps);
              scale = norm_scale(norm, scale) * largest(p.weight.exact) + largest(p.bias.exact);
              want = norm.forward(p.weight.exact, bias ? p.bias.exact : std::vector<double>());
            }
            want = p.rotated(want, token, false);
            const int64_t at = p.offset(token, h);
            expect_close(&y[at], want, scale * p.angle_scale(), p.terms(),
                         kernel.target + ", head_dim " + std::to_string(p.dim));
            ASSERT_EQ(0, std::memcmp(&y[at], &in_place[at], size_t(p.dim) * sizeof(T)));
          }
        }
        p.expect_rest_untouched(y, p.dy.stored);
        p.expect_rest_untouched(in_place, p.x.stored);
      }
    }
  });
}

// dx over x, dx over dy, and dx elsewhere.
TYPED_TEST(QkTest, BackwardMatchesJacobian) {
  using T = TypeParam;
  using A = acc_t<T>;
  for_problems<T>([](const Problem<T>& p) {
    const int64_t tokens = p.kBatch * p.kTime;
    for (const auto& kernel : CKPT_KERNELS(qk_bwd)) {
      std::vector<T> x = p.x.stored, dy = p.dy.stored, apart(x.size());
      std::vector<A> dw(size_t(p.dim), A(0)), db = dw;
      const auto run = [&](std::vector<T>& dx, void* dweight, void* dbias) {
        const QkBwd a{p.shape, p.view(static_cast<const void*>(dy.data())),
                      p.view(static_cast<const void*>(x.data())),
                      p.view(static_cast<void*>(dx.data()))};
        RowScratch scratch(4 * RowScratch::size<double>(p.dim));
        kernel.run(a, 0, tokens, dweight, dbias, scratch);
      };
      run(apart, dw.data(), db.data());
      run(x, nullptr, nullptr);
      const std::vector<T> over_x = x;
      x = p.x.stored;
      run(dy, nullptr, nullptr);

      std::vector<double> want_dw(size_t(p.dim), 0.0), want_db = want_dw;
      const std::string what = kernel.target + ", head_dim " + std::to_string(p.dim);
      double most = 0;
      for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t h = 0; h < p.kHeads; ++h) {
          auto want = p.rotated(p.head(p.dy.exact, token, h), token, true);
          double scale = largest(p.dy.exact) * p.angle_scale();
          if (p.norm != NormKind::none) {
            const auto row = p.head(p.x.exact, token, h);
            const NaiveNorm norm(p.norm, row, kEps);
            for (int64_t i = 0; i < p.dim; ++i) {
              want_dw[i] += want[i] * norm.xhat[i];
              want_db[i] += want[i];
            }
            const double size = norm_scale(norm, largest(row));
            most = std::max(most, scale * size);
            scale *= norm.rstd * largest(p.weight.exact) * size * size;
            want = norm.backward(want, p.weight.exact);
          }
          const int64_t at = p.offset(token, h);
          expect_close(&apart[at], want, scale, p.terms(), what);
          ASSERT_EQ(0, std::memcmp(&apart[at], &over_x[at], size_t(p.dim) * sizeof(T))) << what;
          ASSERT_EQ(0, std::memcmp(&apart[at], &dy[at], size_t(p.dim) * sizeof(T))) << what;
        }
      }
      p.expect_rest_untouched(over_x, p.x.stored);
      p.expect_rest_untouched(dy, p.dy.stored);
      expect_close(dw.data(), want_dw, tokens * p.kHeads * most, p.terms(), what + ", dw");
      expect_close(db.data(), want_db, tokens * p.kHeads * most, p.terms(), what + ", db");
    }
  });
}

}  // namespace
}  // namespace ckptfused
