#include "kernels/cpu/norm.h"
#include "tests/cuda/rows_util.h"

namespace ckptfused {
namespace {

// One launch of as many sums as it takes, each of another size and type.
template <typename A>
void check(int64_t sums) {
  std::vector<std::vector<A>> partials;
  std::vector<std::vector<double>> got, want;
  std::vector<GradSum> jobs;
  constexpr DType kTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
  for (int64_t n = 0; n < sums; ++n) {
    const int64_t count = 1 + 20 * (n % 3), cols = n == 3 ? 0 : 1 + 37 * n;
    partials.push_back(random_values<A>(count * cols, uint32_t(n)).stored);
    got.emplace_back(size_t(cols) + 1, -1.0);  // room for any type, and a guard behind
    want.push_back(got.back());
    jobs.push_back({partials.back().data(), got.back().data(), count, cols, kTypes[n % 4]});
  }
  const DType acc = dtype_of<A>();
  ASSERT_EQ(nullptr, sum_grads_cuda(jobs.data(), sums, acc, nullptr));
  for (int64_t n = 0; n < sums; ++n) {
    GradSum& job = jobs[size_t(n)];
    // In lanes of every 16th row, then these.
    std::vector<A> lanes(size_t(16 * job.cols), A(0));
    for (int64_t row = 0; row < job.count; ++row) {
      for (int64_t c = 0; c < job.cols; ++c) {
        lanes[size_t(row % 16 * job.cols + c)] +=
            static_cast<const A*>(job.from)[row * job.cols + c];
      }
    }
    job.from = lanes.data();
    job.count = 16;
    job.to = want[size_t(n)].data();
    sum_grads_cols(job, acc, 0, job.cols);
    EXPECT_TRUE(same_bits(want[size_t(n)], got[size_t(n)])) << n;
  }
}

TEST(SumGradsCuda, SeveralAtOnce) {
  for (const int64_t sums : {int64_t(1), int64_t(2), int64_t(9), kMostGradSums}) {
    check<float>(sums);
    check<double>(sums);
  }
}

TEST(SumGradsCuda, NoneAndTooMany) {
  EXPECT_EQ(nullptr, sum_grads_cuda(nullptr, 0, DType::f32, nullptr));
  const std::vector<GradSum> many(size_t(kMostGradSums + 1));
  EXPECT_NE(nullptr, sum_grads_cuda(many.data(), kMostGradSums + 1, DType::f32, nullptr));
}

}  // namespace
}  // namespace ckptfused
