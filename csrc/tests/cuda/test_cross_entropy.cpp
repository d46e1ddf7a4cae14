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

}  // namespace
}  // namespace ckptfused
