#include "kernels/cuda/activation.h"
#include "kernels/cuda/dropout.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/residual.h"
#include "tests/cuda/large_util.h"

namespace ckptfused {
namespace {

constexpr int64_t kState[2] = {0x123456789abcdef, (int64_t(7) << 32) + 42};

TEST(LargeCuda, DropoutMask) {
  const Dropout d = make_dropout(kState, 0.5, 3, 8);
  for (const Size& size : kElementSizes) {
    Sparse<bool> keep(size.elements());
    const bool* ends[] = {keep.open(0, size.end_elements()),
                          keep.open(size.elements() - size.end_elements(), size.end_elements())};
    const OnlyEnds few(1);
    ASSERT_EQ(nullptr, dropout_mask_cuda(make_dropout(0.5, 3, size.cols), kState, size.rows,
                                         size.cols, keep.data(), nullptr));
    const int64_t groups = (size.cols + 7) / 8;
    for (int64_t i = 0; i < 2 * size.ends; ++i) {
      for (int64_t col = 0; col < size.cols; ++col) {
        const int64_t counter = size.row(i) * groups + col / 8;
        const Philox4x32 draws = philox4x32<7>(uint32_t(counter), uint32_t(counter >> 32),
                                               d.counter2, d.counter3, d.key0, d.key1);
        const uint32_t draw = draws.word[col % 8 / 2] >> (16 * (col % 2)) & 0xffff;
        ASSERT_EQ(draw >= d.threshold, ends[i / size.ends][i % size.ends * size.cols + col])
            << "width " << size.cols << ", row " << size.row(i) << ", column " << col;
      }
    }
  }
}

ActivationShape swiglu(int64_t cols) {
  ActivationShape shape{};
  shape.dtype = DType::bf16;
  shape.act = Activation::silu;
  shape.gated = true;
  shape.cols = cols;
  shape.dropout = make_dropout(0.3, 2, cols);
  return shape;
}

// Runs both directions on the large tensors, and on each piece of the small ones as the rows of the
// large ones that it is.
void check_activation(const Size& size, int64_t count, int64_t stride, int64_t row_stride) {
  using Tensor = Pieces<bf16>;
  const int64_t length = size.end_elements();
  Tensor g(count, length, stride, 1), u(count, length, stride, 2), dh(count, length, stride, 3),
      h(count, length, stride, 4), h2(count, length, stride, 4), dg(count, length, stride, 5),
      du(count, length, stride, 6);
  const auto run = [&](int64_t row0, int64_t rows, int64_t stride, auto at) {
    ActivationShape shape = swiglu(size.cols);
    shape.row0 = row0;
    const auto in = [&](Tensor& t) { return Strided<const void*>{at(t), stride}; };
    const auto out = [&](Tensor& t) { return Strided<void*>{at(t), stride}; };
    const ActivationFwd fwd{shape, in(g), in(u), out(h)};
    const ActivationBwd bwd{shape, in(g), in(u), in(dh), out(h2), out(dg), out(du)};
    ASSERT_EQ(nullptr, activation_fwd_cuda(fwd, kState, rows, nullptr));
    ASSERT_EQ(nullptr, activation_bwd_cuda(bwd, kState, rows, nullptr));
  };
  for (int64_t i = 0; i < count; ++i) {
    run(count == 2 ? size.row(i * size.ends) : i, size.ends, size.cols,
        [&](Tensor& t) { return &t.small[i * length]; });
  }
  const OnlyEnds few(1);
  run(0, size.rows, row_stride, [](Tensor& t) { return t.large.data(); });
  EXPECT_TRUE(h.same() && h2.same() && dg.same() && du.same()) << "width " << size.cols;
  // The zeros are the mask's, which knows nothing of row0.
  const Dropout mask = with_state(swiglu(size.cols).dropout, kState);
  for (int64_t i = 0; i < int64_t(h.small.size()); ++i) {
    const int64_t r = i / size.cols, row = count == 2 ? size.row(r) : r;
    ASSERT_EQ(to_acc(h.small[i]) != 0, mask.keep(row, i % size.cols)) << "row " << row;
  }
}

TEST(LargeCuda, Activation) {
  for (const Size& size : kElementSizes) {
    check_activation(size, 2, size.elements() - size.end_elements(), size.cols);
  }
}

TEST(LargeCuda, ActivationOfRowsFarApart) {
  for (const int64_t cols : {24, 37}) {
    check_activation({3, cols, 1}, 3, kTwo32, kTwo32);
  }
}

// Rows in memory are [T, B = 4] or, where that does not divide them, batch-first.
RowMap map_of(const Size& size) {
  RowMap map;
  if (size.rows % 4 == 0) map = {size.rows / 4, 4};
  return map;
}
constexpr double kM = 0.5, kP = 0.25;

// v = scale * drop(v) as a residual's kernels do it, plus x where there is one.
void drop(const Size& size, int site, const std::vector<float>* x, std::vector<float>& v) {
  const Dropout mask = make_dropout(kState, kP, site, size.cols);
  const float scale = float(kM) * mask.scale_as<float>();
  for (int64_t i = 0; i < int64_t(v.size()); ++i) {
    const bool keep = mask.keep(map_of(size)(size.row(i / size.cols)), i % size.cols);
    const float added = x == nullptr ? 0.0f : (*x)[i];
    v[i] = keep ? std::fma(v[i], scale, added) : added;
  }
}

TEST(LargeCuda, ResidualForward) {
  for (const Size& size : kRowSizes) {
    Ends<float> x(size.elements(), size.end_elements(), 1);
    Ends<float> f(size.elements(), size.end_elements(), 2);
    Ends<float> sum(size.elements(), size.end_elements(), 3);
    Ends<float> normed(size.elements(), size.end_elements(), 4);
    ResidualFwd a{};
    a.cols = size.cols;
    a.r = a.p = a.normed_dtype = DType::f32;
    a.next = NormKind::rmsnorm;
    a.next_eps = kEps;
    a.m = kM;
    a.dropout = make_dropout(kP, 1, size.cols);
    a.row_map = map_of(size);
    a.x = x.large.data();
    a.f = f.large.data();
    a.sum = sum.large.data();
    a.normed = normed.large.data();
    {
      const OnlyEnds few(1);
      ASSERT_EQ(nullptr, residual_fwd_cuda(a, kState, size.rows, kManyMultiprocessors, nullptr));
    }
    sum.small = f.small;
    drop(size, 1, &x.small, sum.small);
    const NormFwd norm{a.next,           kEps, size.cols, DType::f32,         DType::f32,
                       sum.small.data(), {},   {},        normed.small.data()};
    ASSERT_EQ(nullptr, norm_fwd_cuda(norm, 2 * size.ends, kManyMultiprocessors, nullptr));
    EXPECT_TRUE(sum.same() && normed.same()) << "width " << size.cols;
  }
}

// The gradient of a post norm is that of the norm, of a dropped ds.
TEST(LargeCuda, ResidualBackward) {
  for (const NormKind post : {NormKind::none, NormKind::rmsnorm}) {
    const bool none = post == NormKind::none;
    for (const Size& size : none ? kElementSizes : kRowSizes) {
      Ends<float> ds(size.elements(), size.end_elements(), 1);
      Ends<float> f(size.elements(), size.end_elements(), 2);
      Ends<float> df(size.elements(), size.end_elements(), 3);
      ResidualBwd a{};
      a.cols = size.cols;
      a.r = a.p = DType::f32;
      a.post = post;
      a.post_eps = kEps;
      a.m = kM;
      a.dropout = make_dropout(kP, 3, size.cols);
      a.row_map = map_of(size);
      a.ds = ds.large.data();
      a.f = none ? nullptr : f.large.data();
      a.df = df.large.data();
      {
        const OnlyEnds few(1);
        ASSERT_EQ(nullptr, residual_bwd_summed(a, kState, size.rows, size.rows / size.ends, nullptr,
                                               nullptr, nullptr, nullptr, nullptr));
      }
      drop(size, 3, nullptr, ds.small);
      const NormBwd norm{
          post,           kEps, size.cols, DType::f32,     DType::f32, ds.small.data(),
          f.small.data(), {},   nullptr,   df.small.data()};
      ASSERT_EQ(nullptr, norm_bwd_summed(norm, 2 * size.ends, 2, nullptr, nullptr, nullptr, nullptr,
                                         nullptr));
      EXPECT_TRUE(df.same()) << "width " << size.cols << ", post " << int(post);
    }
  }
}

// Heads of 16 columns [batch, time, heads, 16], with cos and sin [batch, time, 8]; strides of the
// small tensors and of the large ones.
struct Heads {
  int64_t batch, time, heads;
  int64_t strides[3];
  int64_t angle_stride;
};
constexpr int64_t kDim = 16, kHalf = 8;

QkShape shape_of(const Heads& size, NormKind norm, const float* cos, const float* sin) {
  return {DType::bf16, norm, kEps, RopeKind::half,   size.time, size.heads, kDim, 2 * kHalf,
          {},          cos,  sin,  size.angle_stride};
}
template <typename Pointer>
HeadsView<Pointer> view_of(const Heads& size, bf16* data) {
  return {data, size.strides[0], size.strides[1], size.strides[2]};
}

// Pieces of the heads lie `stride` apart in the large tensors, and pieces of the angles
// angle_stride.
void check_qk(const Heads& small, const Heads& large, int64_t count, int64_t stride,
              int64_t angle_count, int64_t angle_stride) {
  const int64_t length = small.batch * small.time * small.heads * kDim / count;
  const int64_t angles = small.batch * small.time * kHalf / angle_count;
  Pieces<float> cos(angle_count, angles, angle_stride, 1),
      sin(angle_count, angles, angle_stride, 2);
  Pieces<bf16> x(count, length, stride, 3), y(count, length, stride, 4),
      dy(count, length, stride, 5), dx(count, length, stride, 6);
  const auto run = [&](const Heads& size, NormKind norm, auto at) {
    const QkShape shape = shape_of(size, norm, at(cos), at(sin));
    const auto in = [&](auto& t) { return view_of<const void*>(size, at(t)); };
    const auto out = [&](auto& t) { return view_of<void*>(size, at(t)); };
    const int64_t tokens = size.batch * size.time;
    ASSERT_EQ(nullptr, qk_fwd_cuda(QkFwd{shape, {}, in(x), out(y)}, tokens, nullptr));
    ASSERT_EQ(nullptr, qk_bwd_summed({shape, in(dy), in(x), out(dx)}, tokens, 1, nullptr, nullptr,
                                     nullptr, nullptr, nullptr));
  };
  for (const NormKind norm : {NormKind::none, NormKind::layernorm}) {
    run(small, norm, [](auto& t) { return t.small.data(); });
    const OnlyEnds few(1);
    run(large, norm, [](auto& t) { return t.large.data(); });
    EXPECT_TRUE(y.same() && dx.same()) << "norm " << int(norm);
  }
}

// More than 2^32 tokens, of which a block takes 512.
TEST(LargeCuda, QkOfManyTokens) {
  constexpr int64_t kTokens = 512, kTime = kTwo32 / 2 + kTokens / 2;
  check_qk({2, kTokens, 1, {kTokens * kDim, kDim, kDim}, kTokens * kHalf},
           {2, kTime, 1, {kTime * kDim, kDim, kDim}, kTime * kHalf}, 2,
           (2 * kTime - kTokens) * kDim, 2, (2 * kTime - kTokens) * kHalf);
}

// Sequences, tokens or heads that lie far apart, and sequences' angles.
TEST(LargeCuda, QkOfHeadsFarApart) {
  constexpr int64_t kBatch = 2, kTime = 3, kHeads = 2;
  check_qk({kBatch, kTime, kHeads, {kTime * kHeads * kDim, kHeads * kDim, kDim}, kTime * kHalf},
           {kBatch, kTime, kHeads, {kTwo32, kHeads * kDim, kDim}, kTwo32}, kBatch, kTwo32, kBatch,
           kTwo32);
  check_qk({kBatch, kTime, kHeads, {kHeads * kDim, kBatch * kHeads * kDim, kDim}, 0},
           {kBatch, kTime, kHeads, {kHeads * kDim, kTwo32, kDim}, 0}, kTime, kTwo32, 1, 0);
  check_qk({kBatch, kTime, kHeads, {kTime * kDim, kDim, kBatch * kTime * kDim}, 0},
           {kBatch, kTime, kHeads, {kTime * kDim, kDim, kTwo32}, 0}, kHeads, kTwo32, 1, 0);
}

}  // namespace
}  // namespace ckptfused
