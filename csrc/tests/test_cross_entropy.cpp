#include "kernels/cpu/cross_entropy.h"

#include <cstring>
#include <limits>

#include "tests/naive_cross_entropy.h"

namespace ckptfused {

CKPT_DECLARE_KERNEL(void, cross_entropy_fwd, (const CrossEntropyFwd&, int64_t, int64_t))
CKPT_DECLARE_KERNEL(void, cross_entropy_bwd, (const CrossEntropyBwd&, int64_t, int64_t))

namespace {

template <typename T>
class CrossEntropyTest : public testing::Test {};
using Types = testing::Types<double, float, bf16, f16>;
TYPED_TEST_SUITE(CrossEntropyTest, Types);

TYPED_TEST(CrossEntropyTest, MatchesItsDefinition) {
  for (const auto& problem : cross_entropy_problems<TypeParam>()) {
    const auto backwards = CKPT_KERNELS(cross_entropy_bwd);
    size_t target = 0;
    for (const auto& kernel : CKPT_KERNELS(cross_entropy_fwd)) {
      SCOPED_TRACE(kernel.target);
      const auto& backward = backwards[target++];
      problem.check([&](const CrossEntropyFwd& a) { kernel.run(a, 0, problem.rows); },
                    [&](const CrossEntropyBwd& a) { backward.run(a, 0, problem.rows); });
    }
  }
}

TYPED_TEST(CrossEntropyTest, HiddenClassesHaveNoGradientAndNaNIsSeen) {
  const CrossEntropyProblem<TypeParam> problem(2, 40, {});
  std::vector<TypeParam> logits = problem.products.stored;
  for (int64_t c = 8; c < 40; ++c) logits[c] = store<TypeParam>(-INFINITY);
  logits[40 + 5] = store<TypeParam>(std::numeric_limits<double>::quiet_NaN());
  acc_t<TypeParam> loss[2], lse[2];
  int64_t predicted[2];
  auto a = problem.template args<CrossEntropyFwd>(logits.data(), 0, 40);
  a.loss = loss;
  a.lse = lse;
  a.predicted = predicted;
  a.grad = true;
  cross_entropy_fwd_rows(a, 0, 2);
  EXPECT_TRUE(std::isfinite(loss[0]));
  for (int64_t c = 8; c < 40; ++c) EXPECT_EQ(0, double(to_acc(logits[c]))) << c;
  EXPECT_TRUE(std::isnan(loss[1]));
  EXPECT_EQ(5, predicted[1]);
}

}  // namespace
}  // namespace ckptfused
