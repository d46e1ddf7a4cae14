#include "kernels/cpu/activation.h"

#include <cstring>
#include <limits>

#include "tests/naive_activation.h"
#include "tests/util.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(void, activation_fwd, (const ActivationFwd&, int64_t, int64_t))
CKPT_DECLARE_KERNEL(void, activation_bwd, (const ActivationBwd&, int64_t, int64_t))

namespace {

using Case = NamedActivation;

constexpr int64_t kState[2] = {0x123456789abcdef, 42};

// A part of a hidden tensor [B = 3, T = 5 (rows 4..10 of it), F = 1200], time first.
template <typename T>
struct Problem {
  static constexpr int64_t kRows = 7, kStride = 1100;
  Case kind;
  int64_t cols;
  ActivationShape shape{};
  Values<T> g = random_values<T>(kRows * kStride, 1, 0.0), u = random_values<T>(kRows * kStride, 2),
            dh = random_values<T>(kRows * kStride, 3);

  Problem(const Case& kind, int64_t cols, double p) : kind(kind), cols(cols) {
    shape.dtype = dtype_of<T>();
    shape.act = kind.act;
    shape.gated = kind.gated;
    shape.coefficients = coefficients_for<T>(kind.act);
    shape.cols = cols;
    shape.row0 = 4;
    shape.col0 = 13;
    shape.rows = {5, 3};
    shape.dropout = make_dropout(kState, p, 2, 1200);
  }

  struct Want {
    double h, dg, du;
  };
  Want want(int64_t row, int64_t col) const {
    const int64_t i = row * kStride + col, n = shape.row0 + row;
    const Dropout& dropout = shape.dropout;
    const int64_t logical = (n % 3) * 5 + n / 3;
    const double mask = dropout.active() && !dropout.keep(logical, 13 + col)
                            ? 0.0
                            : 65536.0 / (65536.0 - dropout.threshold);
    const double x = kind.gated ? g.exact[i] : u.exact[i], up = kind.gated ? u.exact[i] : 1.0;
    const double value = naive(kind.act, x), grad = naive_grad(kind.act, x), d = dh.exact[i] * mask;
    return {value * up * mask, d * up * grad, d * (kind.gated ? value : grad)};
  }

  // Checks one output, and that nothing was written between its rows.
  void expect(const std::vector<T>& got, const std::vector<T>& before, double Want::* member,
              const std::string& target) const {
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<double> wanted;
      for (int64_t col = 0; col < cols; ++col) wanted.push_back(want(row, col).*member);
      expect_close(got.data() + row * kStride, wanted, 4 + 4 * largest(wanted), 8,
                   std::string(kind.name) + " on " + target);
      const size_t gap = size_t(kStride - cols) * sizeof(T);
      ASSERT_EQ(0, std::memcmp(&got[row * kStride + cols], &before[row * kStride + cols], gap));
    }
  }
};

template <typename T>
class ActivationTest : public testing::Test {};
using StorageTypes = testing::Types<double, float, bf16, f16>;
TYPED_TEST_SUITE(ActivationTest, StorageTypes);

TYPED_TEST(ActivationTest, ForwardMatchesDefinition) {
  using T = TypeParam;
  for (const Case& kind : kActivations) {
    for (const int64_t cols : odd_widths()) {
      for (const double p : {0.0, 0.3}) {
        const Problem<T> problem(kind, cols, p);
        for (const auto& kernel : CKPT_KERNELS(activation_fwd)) {
          std::vector<T> h = problem.dh.stored;
          const ActivationFwd a{problem.shape,
                                {problem.g.stored.data(), problem.kStride},
                                {problem.u.stored.data(), problem.kStride},
                                {h.data(), problem.kStride}};
          kernel.run(a, 0, 3);
          kernel.run(a, 3, problem.kRows);
          problem.expect(h, problem.dh.stored, &Problem<T>::Want::h, kernel.target);
        }
      }
    }
  }
}

// h over dh, dg over g, du over u: as the block calls it.
TYPED_TEST(ActivationTest, BackwardInPlaceMatchesDefinition) {
  using T = TypeParam;
  for (const Case& kind : kActivations) {
    for (const int64_t cols : odd_widths()) {
      for (const double p : {0.0, 0.3}) {
        const Problem<T> problem(kind, cols, p);
        for (const auto& kernel : CKPT_KERNELS(activation_bwd)) {
          std::vector<T> g = problem.g.stored, u = problem.u.stored, dh = problem.dh.stored;
          const int64_t stride = problem.kStride;
          ActivationBwd a{problem.shape,       {g.data(), stride},  {u.data(), stride},
                          {dh.data(), stride}, {dh.data(), stride}, {nullptr, 0},
                          {u.data(), stride}};
          if (kind.gated) a.dg = {g.data(), stride};
          kernel.run(a, 0, problem.kRows);
          problem.expect(dh, problem.dh.stored, &Problem<T>::Want::h, kernel.target);
          problem.expect(u, problem.u.stored, &Problem<T>::Want::du, kernel.target);
          if (kind.gated) problem.expect(g, problem.g.stored, &Problem<T>::Want::dg, kernel.target);
        }
      }
    }
  }
}

// Backward makes the h that forward made, to the bit, and each output whether or not the others are
// wanted.
TYPED_TEST(ActivationTest, OutputsDoNotDependOnEachOther) {
  using T = TypeParam;
  for (const Case& kind : kActivations) {
    const Problem<T> problem(kind, 1024, 0.1);
    const int64_t stride = problem.kStride;
    const size_t size = problem.g.stored.size();
    std::vector<T> forward(size), h(size), dg(size), du(size), alone(size);
    activation_fwd_rows({problem.shape,
                         {problem.g.stored.data(), stride},
                         {problem.u.stored.data(), stride},
                         {forward.data(), stride}},
                        0, problem.kRows);
    ActivationBwd a{problem.shape,
                    {problem.g.stored.data(), stride},
                    {problem.u.stored.data(), stride},
                    {problem.dh.stored.data(), stride},
                    {h.data(), stride},
                    {dg.data(), stride},
                    {du.data(), stride}};
    activation_bwd_rows(a, 0, problem.kRows);
    EXPECT_EQ(0, std::memcmp(h.data(), forward.data(), size * sizeof(T))) << kind.name;
    a.h = a.dg = {};
    a.du = {alone.data(), stride};
    activation_bwd_rows(a, 0, problem.kRows);
    EXPECT_EQ(0, std::memcmp(du.data(), alone.data(), size * sizeof(T))) << kind.name;
  }
}

TYPED_TEST(ActivationTest, EdgeValues) {
  using T = TypeParam;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& kernel : CKPT_KERNELS(activation_bwd)) {
    for (const Case& kind : kActivations) {
      // Long enough for the vector loop; a NaN, zeros and large values of both signs.
      Values<T> x = random_values<T>(Problem<T>::kStride, 1);
      const double edges[] = {nan, 0.0, -0.0, 60.0, -60.0};
      for (int i = 0; i < 5; ++i) x.stored[i] = store<T>(edges[i]);
      std::vector<T> ones(x.stored.size(), store<T>(1.0)), h = ones, dx = ones;
      const ActivationShape shape{
          dtype_of<T>(), kind.act, kind.gated, 64, 0, 0, {}, {}, coefficients_for<T>(kind.act)};
      const T* up = kind.gated ? ones.data() : x.stored.data();
      ActivationBwd a{shape, {x.stored.data(), 64}, {up, 64}, {ones.data(), 64}, {h.data(), 64}, {},
                      {}};
      (kind.gated ? a.dg : a.du) = Strided<void*>{dx.data(), 64};
      kernel.run(a, 0, 1);
      const std::string what = std::string(kind.name) + " on " + kernel.target;
      EXPECT_TRUE(std::isnan(double(to_acc(h[0])))) << what;
      const AtEdges at = at_edges(kind.act);
      for (const int i : {1, 2}) {
        EXPECT_EQ(at.zero, double(to_acc(h[i]))) << what;
        EXPECT_EQ(at.slope_at_zero, double(to_acc(dx[i]))) << what;
      }
      EXPECT_EQ(double(round_to<T>(acc_t<T>(at.sixty))), double(to_acc(h[3]))) << what;
      EXPECT_EQ(at.slope_at_sixty, double(to_acc(dx[3]))) << what;
      EXPECT_NEAR(at.below, double(to_acc(h[4])), 1e-20) << what;
      EXPECT_NEAR(at.slope_below, double(to_acc(dx[4])), 1e-20) << what;
    }
  }
}

TYPED_TEST(ActivationTest, DropsAllAtProbabilityOne) {
  using T = TypeParam;
  for (const auto& kernel : CKPT_KERNELS(activation_fwd)) {
    Problem<T> problem(*find_activation("swiglu"), 33, 1.0);
    problem.u.stored[3] = store<T>(std::numeric_limits<double>::infinity());
    std::vector<T> h = problem.dh.stored;
    const int64_t stride = problem.kStride;
    kernel.run({problem.shape,
                {problem.g.stored.data(), stride},
                {problem.u.stored.data(), stride},
                {h.data(), stride}},
               0, 1);
    for (int i = 0; i < 33; ++i) EXPECT_EQ(0.0, double(to_acc(h[i]))) << kernel.target;
  }
}

TEST(Erf, IsWithinTwoUlps) {
  for (double x = -6; x < 6; x += 1e-4) {
    const float at = float(x), want = float(std::erf(double(at)));
    const double ulp = std::nextafter(std::abs(want), 2.0f) - std::abs(want);
    ASSERT_LE(std::abs(double(erf_acc(at)) - std::erf(double(at))), 2 * ulp) << at;
  }
  EXPECT_TRUE(std::isnan(erf_acc(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(1.0f, erf_acc(std::numeric_limits<float>::infinity()));
}

}  // namespace
}  // namespace ckptfused
