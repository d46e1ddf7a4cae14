#include "kernels/cuda/norm.h"
#include "tests/cuda/large_util.h"

namespace ckptfused {
namespace {

template <typename R, typename P>
void check_norm_fwd(const Size& size) {
  Ends<R> x(size.elements(), size.end_elements(), 1);
  Ends<P> y(size.elements(), size.end_elements(), 2);
  NormFwd a{NormKind::layernorm, kEps, size.cols, dtype_of<R>(), dtype_of<P>(),
            x.small.data(),      {},   {},        y.small.data()};
  ASSERT_EQ(nullptr, norm_fwd_cuda(a, 2 * size.ends, kManyMultiprocessors, nullptr));
  a.x = x.large.data();
  a.y = y.large.data();
  const OnlyEnds few(1);
  ASSERT_EQ(nullptr, norm_fwd_cuda(a, size.rows, kManyMultiprocessors, nullptr));
  EXPECT_TRUE(y.same()) << "width " << size.cols;
}

TEST(LargeCuda, NormForward) {
  for (const Size& size : kRowSizes) {
    check_norm_fwd<bf16, bf16>(size);
    check_norm_fwd<float, bf16>(size);
    // Of rows that are not held a block takes one, and a grid has fewer than 2^31 blocks.
    if (size.ends == 1) check_norm_fwd<double, double>(size);
  }
}

// A block takes size.ends rows.
template <typename R, typename P>
void check_norm_bwd(const Size& size) {
  Ends<R> x(size.elements(), size.end_elements(), 1), dres(size.elements(), size.end_elements(), 2),
      dx(size.elements(), size.end_elements(), 3);
  Ends<P> dy(size.elements(), size.end_elements(), 4);
  NormBwd a{NormKind::layernorm, kEps,           size.cols, dtype_of<R>(),     dtype_of<P>(),
            dy.small.data(),     x.small.data(), {},        dres.small.data(), dx.small.data()};
  const auto run = [&](int64_t rows) {
    const int64_t chunks = rows / size.ends;
    ASSERT_EQ(nullptr,
              norm_bwd_summed(a, rows, chunks, nullptr, nullptr, nullptr, nullptr, nullptr));
  };
  run(2 * size.ends);
  a.dy = dy.large.data();
  a.x = x.large.data();
  a.dres = dres.large.data();
  a.dx = dx.large.data();
  const OnlyEnds few(1);
  run(size.rows);
  EXPECT_TRUE(dx.same()) << "width " << size.cols;
}

TEST(LargeCuda, NormBackward) {
  for (const Size& size : kRowSizes) {
    check_norm_bwd<bf16, bf16>(size);
    check_norm_bwd<float, bf16>(size);
    check_norm_bwd<double, double>(size);
  }
}

// Partial sums of more than 2^32 columns altogether. Those of the blocks that did not run are
// zeros. A gradient's first and last columns are summed.
TEST(LargeCuda, NormBackwardOfParameters) {
  constexpr int64_t kCols = 65536, kChunks = kTwo32 / kCols + 1, kSummed = 32;
  const Size size{kChunks, kCols, 1};
  Ends<float> x(size.elements(), size.end_elements(), 1);
  Ends<float> dy(size.elements(), size.end_elements(), 2);
  std::vector<float> small_partials(2 * kCols), want(kCols), got(kCols);
  NormBwd a{NormKind::rmsnorm, kEps,           kCols, DType::f32, DType::f32,
            dy.small.data(),   x.small.data(), {},    nullptr,    nullptr};
  const OnlyEnds few(1);
  ASSERT_EQ(nullptr, norm_bwd_summed(a, 2, 2, small_partials.data(), nullptr, want.data(), nullptr,
                                     nullptr));
  Sparse<float> partials(kChunks * kCols);
  partials.open_to_read();
  partials.open(0, kCols);
  partials.open((kChunks - 1) * kCols, kCols);
  a.dy = dy.large.data();
  a.x = x.large.data();
  ASSERT_EQ(nullptr, norm_bwd_summed(a, size.rows, kChunks, partials.data(), nullptr, got.data(),
                                     nullptr, nullptr));
  for (int64_t i = 0; i < kSummed; ++i) {
    ASSERT_EQ(want[i], got[i]) << i;
    ASSERT_EQ(want[kCols - 1 - i], got[kCols - 1 - i]) << i;
  }
}

// Kind none, which adds.
TEST(LargeCuda, NormBackwardOfNone) {
  for (const Size& size : kElementSizes) {
    Ends<float> dx(size.elements(), size.end_elements(), 1);
    Ends<bf16> dy(size.elements(), size.end_elements(), 2);
    NormBwd a{NormKind::none,  kEps,    size.cols, DType::f32,      DType::bf16,
              dy.small.data(), nullptr, {},        dx.small.data(), dx.small.data()};
    ASSERT_EQ(nullptr,
              norm_bwd_summed(a, 2 * size.ends, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
    a.dy = dy.large.data();
    a.dres = a.dx = dx.large.data();
    const OnlyEnds few(1);
    ASSERT_EQ(nullptr,
              norm_bwd_summed(a, size.rows, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
    EXPECT_TRUE(dx.same()) << "width " << size.cols;
  }
}

}  // namespace
}  // namespace ckptfused
