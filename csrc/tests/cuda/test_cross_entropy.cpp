#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/cross_entropy.h"
#include "tests/naive_cross_entropy.h"

namespace ckptfused {
namespace {

template <typename T>
class CrossEntropyTest : public testing::Test {};
using Types = std::conditional_t<kThreadSanitizer, testing::Types<bf16>,
                                 testing::Types<double, float, bf16, f16>>;
TYPED_TEST_SUITE(CrossEntropyTest, Types);

TYPED_TEST(CrossEntropyTest, MatchesItsDefinition) {
  for (const auto& problem : cross_entropy_problems<TypeParam>()) {
    problem.check(
        [&](const CrossEntropyFwd& a) {
          ASSERT_EQ(nullptr, cross_entropy_fwd_cuda(a, problem.rows, nullptr));
        },
        [&](const CrossEntropyBwd& a) {
          ASSERT_EQ(nullptr, cross_entropy_bwd_cuda(a, problem.rows, nullptr));
        });
  }
}

TYPED_TEST(CrossEntropyTest, RowsWiderThanABlock) {
  const CrossEntropyProblem<TypeParam> problem(2, 4105, {1, 30, 0.1, 0.01});
  problem.check([&](const CrossEntropyFwd& a) { cross_entropy_fwd_cuda(a, 2, nullptr); },
                [&](const CrossEntropyBwd& a) { cross_entropy_bwd_cuda(a, 2, nullptr); });
}

TYPED_TEST(CrossEntropyTest, ATargetThatIsNoClassGivesNaN) {
  CrossEntropyProblem<TypeParam> problem(2, 40, {});
  problem.targets = {40, 3};
  std::vector<TypeParam> logits = problem.products.stored;
  acc_t<TypeParam> loss[2], lse[2];
  auto a = problem.template args<CrossEntropyFwd>(logits.data(), 0, 40);
  a.loss = loss;
  a.lse = lse;
  a.grad = true;
  ASSERT_EQ(nullptr, cross_entropy_fwd_cuda(a, 2, nullptr));
  EXPECT_TRUE(std::isnan(loss[0]));
  EXPECT_TRUE(std::isfinite(loss[1]));
  for (int64_t c = 0; c < 40; ++c) {
    EXPECT_TRUE(std::isnan(double(to_acc(logits[c])))) << c;
    EXPECT_TRUE(std::isfinite(double(to_acc(logits[40 + c])))) << c;
  }
}

// Rows that are wider than the groups of one pass: with a NaN, hidden but for one class, hidden
// throughout, with an infinity, and an ignored one with a NaN.
TYPED_TEST(CrossEntropyTest, NumbersThatAreNone) {
  constexpr int64_t kRows = 5, kClasses = 8216, kAt = 4999;
  const double nan = NAN, hidden = -INFINITY;
  for (const double softcap : {0.0, 30.0}) {
    CrossEntropyProblem<TypeParam> problem(kRows, kClasses, {1, softcap});
    problem.targets = {1, kAt, kAt, 2, -100};
    std::vector<TypeParam> logits = problem.products.stored;
    const auto row = [&](int64_t r) { return logits.data() + r * kClasses; };
    row(0)[kAt] = row(0)[kAt + 1] = row(4)[kAt] = store<TypeParam>(nan);
    for (int64_t r : {1, 2}) std::fill_n(row(r), kClasses, store<TypeParam>(hidden));
    row(1)[kAt] = store<TypeParam>(1);
    row(3)[kAt] = store<TypeParam>(-hidden);
    acc_t<TypeParam> loss[kRows], lse[kRows];
    int64_t predicted[kRows];
    auto a = problem.template args<CrossEntropyFwd>(logits.data(), 0, kClasses);
    a.loss = loss;
    a.lse = lse;
    a.predicted = predicted;
    a.grad = true;
    ASSERT_EQ(nullptr, cross_entropy_fwd_cuda(a, kRows, nullptr));
    EXPECT_TRUE(std::isnan(loss[0]) && std::isnan(lse[0]));
    EXPECT_EQ(kAt, predicted[0]);
    EXPECT_EQ(kAt, predicted[4]);
    EXPECT_EQ(0, loss[4]);
    for (int64_t c = 0; c < kClasses; ++c) EXPECT_EQ(0, double(to_acc(row(4)[c]))) << c;
    if (softcap != 0) continue;  // whose logits are finite
    EXPECT_EQ(0, loss[1]);
    for (int64_t c = 0; c < kClasses; ++c) EXPECT_EQ(0, double(to_acc(row(1)[c]))) << c;
    EXPECT_EQ(kAt, predicted[1]);
    EXPECT_EQ(-INFINITY, lse[2]);
    EXPECT_EQ(0, predicted[2]);
    EXPECT_TRUE(std::isnan(lse[3]));
    EXPECT_EQ(kAt, predicted[3]);
  }
}

}  // namespace
}  // namespace ckptfused
