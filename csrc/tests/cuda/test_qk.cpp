#include <cstring>

#include "kernels/cpu/qk.h"
#include "kernels/cuda/qk.h"
#include "tests/cuda/rows_util.h"
#include "tests/naive_norm.h"
#include "tests/naive_rope.h"

namespace ckptfused {
namespace {

constexpr double kEps = 1e-5;
constexpr NormKind kNorms[] = {NormKind::none, NormKind::layernorm, NormKind::rmsnorm,
                               NormKind::gemma};
constexpr RopeKind kRopes[] = {RopeKind::none, RopeKind::half, RopeKind::interleaved};

struct Case {
  int64_t batch, time, heads, dim, rotary;
  NormKind norm;
  RopeKind rope;
  bool sequence_first = false;
  int64_t shift = 0;  // elements behind a 16-byte boundary
};

template <typename T>
constexpr int64_t to_boundary(const std::vector<T>& v) {
  return int64_t((16 - reinterpret_cast<uintptr_t>(v.data()) % 16) % 16 / sizeof(T));
}

// Heads in the middle of a joint [B, T, (H + 2) * D] product, or a [T, B, ...] one. P: the type
// that the norm's weight and bias are held in.
template <typename T, typename P = acc_t<T>>
struct Problem : Case {
  using A = acc_t<T>;
  int64_t row_stride, tokens;
  QkShape shape{};
  Values<T> x, dy;
  Values<P> weight, bias;
  Values<A> cos, sin;

  explicit Problem(const Case& c, bool shared_angles = false)
      : Case(c), row_stride((heads + 2) * dim), tokens(batch * time) {
    if (rope == RopeKind::none) rotary = 0;
    x = random_values<T>(tokens * row_stride + 16, 1);
    dy = random_values<T>(tokens * row_stride + 16, 2);
    weight = random_values<P>(dim, 3);
    bias = random_values<P>(dim, 4);
    cos = random_values<A>(tokens * rotary / 2 + 1, 5);
    sin = random_values<A>(tokens * rotary / 2 + 1, 6);
    shape = {dtype_of<T>(),
             norm,
             kEps,
             rope,
             time,
             heads,
             dim,
             rotary,
             {weight.stored.data(), dtype_of<P>()},
             cos.stored.data(),
             sin.stored.data(),
             shared_angles ? 0 : time * rotary / 2};
    if (norm == NormKind::gemma) {
      for (double& w : weight.exact) w += 1;
    }
  }

  int64_t offset(const std::vector<T>& v, int64_t token, int64_t h) const {
    const int64_t b = token / time, t = token % time;
    const int64_t row = sequence_first ? t * batch + b : token;
    return to_boundary(v) + shift + row * row_stride + (1 + h) * dim;
  }
  template <typename Pointer>
  HeadsView<Pointer> view(std::vector<T>& v) const {
    return {v.data() + offset(v, 0, 0), sequence_first ? row_stride : time * row_stride,
            sequence_first ? batch * row_stride : row_stride, dim};
  }
  std::vector<double> head(const Values<T>& v, int64_t token, int64_t h) const {
    const auto begin = v.exact.begin() + offset(v.stored, token, h);
    return {begin, begin + dim};
  }

  std::vector<double> rotated(const std::vector<double>& v, int64_t token, bool transposed) const {
    const int64_t half = rotary / 2;
    const int64_t row = shape.cos_batch_stride == 0 ? token % time : token;
    return naive_rope(v, shape.rope, cos.exact.data() + row * half, sin.exact.data() + row * half,
                      half, transposed);
  }
  double angle_scale() const { return rotary == 0 ? 1 : largest(cos.exact) + largest(sin.exact); }
  double terms() const { return 24 + double(dim) / 16; }
  std::string name() const {
    return "head_dim " + std::to_string(dim) + ", rotary " + std::to_string(rotary) + ", norm " +
           std::to_string(int(norm)) + ", rope " + std::to_string(int(rope)) + ", shift " +
           std::to_string(shift);
  }

  // got is as before but for the heads.
  void expect_rest_untouched(const std::vector<T>& got, const std::vector<T>& before) const {
    std::vector<bool> head_entry(got.size());
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t i = 0; i < heads * dim; ++i) head_entry[offset(got, token, 0) + i] = true;
    }
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(head_entry[i] || std::memcmp(&got[i], &before[i], sizeof(T)) == 0) << name();
    }
  }
  // The heads of two buffers have the same bits.
  void expect_same_heads(const std::vector<T>& a, const std::vector<T>& b) const {
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t h = 0; h < heads; ++h) {
        ASSERT_EQ(0, std::memcmp(&a[offset(a, token, h)], &b[offset(b, token, h)],
                                 size_t(dim) * sizeof(T)))
            << name();
      }
    }
  }

  void check_forward(bool with_bias) const {
    std::vector<T> in = x.stored, y = dy.stored, in_place = x.stored, cpu = x.stored;
    const auto args = [&](std::vector<T>& from, std::vector<T>& to) {
      QkFwd a{shape, {}, view<const void*>(from), view<void*>(to)};
      if (with_bias) a.bias = {bias.stored.data(), dtype_of<P>()};
      return a;
    };
    ASSERT_EQ(nullptr, qk_fwd_cuda(args(in, y), tokens, nullptr));
    ASSERT_EQ(nullptr, qk_fwd_cuda(args(in_place, in_place), tokens, nullptr));
    qk_fwd_rows(args(cpu, cpu), 0, tokens);
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t h = 0; h < heads; ++h) {
        auto want = head(x, token, h);
        double scale = largest(want);
        if (norm != NormKind::none) {
          const NaiveNorm by(norm, want, kEps);
          scale = norm_scale(by, scale) * largest(weight.exact) + largest(bias.exact);
          want = by.forward(weight.exact, with_bias ? bias.exact : std::vector<double>());
        }
        scale *= angle_scale();
        const T* got = &y[offset(y, token, h)];
        expect_close(got, rotated(want, token, false), scale, terms(), name());
        expect_alike(got, &cpu[offset(cpu, token, h)], size_t(dim), scale, terms(), name());
      }
    }
    expect_same_heads(y, in_place);
    expect_rest_untouched(y, dy.stored);
    expect_rest_untouched(in_place, x.stored);
  }

  // dx elsewhere, over x and over dy.
  void check_backward(int multiprocessors = 1) const {
    const int64_t chunks = gpu_grad_chunks(tokens, dim, heads, multiprocessors);
    std::vector<A> dw(size_t(dim), A(-1)), db = dw, dw_parts(size_t(chunks * dim), A(-1)),
                                           db_parts = dw_parts;
    std::vector<T> in = x.stored, grad = dy.stored, apart = x.stored;
    const auto run = [&](std::vector<T>& from, std::vector<T>& dx, bool want_dw, bool want_db) {
      const QkBwd a{shape, view<const void*>(grad), view<const void*>(from), view<void*>(dx)};
      const auto if_wanted = [](bool wanted, std::vector<A>& v) {
        return wanted ? v.data() : nullptr;
      };
      ASSERT_EQ(nullptr, qk_bwd_summed(a, tokens, chunks, if_wanted(want_dw, dw_parts),
                                       if_wanted(want_db, db_parts), if_wanted(want_dw, dw),
                                       if_wanted(want_db, db), nullptr));
    };
    run(in, apart, true, true);
    const std::vector<A> first_dw = dw, first_db = db;
    std::vector<T> over_x = x.stored;
    run(over_x, over_x, true, false);
    std::vector<T> cpu_grad = grad, cpu = x.stored;
    run(in, grad, false, false);
    EXPECT_EQ(first_dw, dw);
    std::vector<A> cpu_dw(size_t(dim), A(0)), cpu_db = cpu_dw;
    qk_bwd_rows({shape, view<const void*>(cpu_grad), view<const void*>(cpu), view<void*>(cpu)}, 0,
                tokens, cpu_dw.data(), cpu_db.data());

    std::vector<double> want_dw(size_t(dim), 0.0), want_db = want_dw;
    double most = 0;
    for (int64_t token = 0; token < tokens; ++token) {
      for (int64_t h = 0; h < heads; ++h) {
        auto want = rotated(head(dy, token, h), token, true);
        double scale = largest(dy.exact) * angle_scale();
        if (norm != NormKind::none) {
          const auto row = head(x, token, h);
          const NaiveNorm by(norm, row, kEps);
          for (int64_t i = 0; i < dim; ++i) {
            want_dw[i] += want[i] * by.xhat[i];
            want_db[i] += want[i];
          }
          const double size = norm_scale(by, largest(row));
          most = std::max(most, scale * size);
          scale *= by.rstd * largest(weight.exact) * size * size;
          want = by.backward(want, weight.exact);
        }
        const T* got = &apart[offset(apart, token, h)];
        expect_close(got, want, scale, terms(), name());
        expect_alike(got, &cpu[offset(cpu, token, h)], size_t(dim), scale, terms(), name());
      }
    }
    expect_same_heads(apart, over_x);
    expect_same_heads(apart, grad);
    expect_rest_untouched(apart, x.stored);
    expect_rest_untouched(over_x, x.stored);
    expect_rest_untouched(grad, dy.stored);
    if (norm == NormKind::none) return;
    const double sum = double(tokens * heads) * most;
    expect_close(dw.data(), want_dw, sum, terms(), name() + ", dw");
    expect_close(db.data(), want_db, sum, terms(), name() + ", db");
    expect_alike(dw.data(), cpu_dw.data(), size_t(dim), sum, terms(), name() + ", dw");
    expect_alike(db.data(), cpu_db.data(), size_t(dim), sum, terms(), name() + ", db");
  }
};

template <typename T>
class QkCuda : public testing::Test {};
using StorageTypes = std::conditional_t<kThreadSanitizer, testing::Types<bf16>,
                                        testing::Types<double, float, bf16, f16>>;
TYPED_TEST_SUITE(QkCuda, StorageTypes);

TYPED_TEST(QkCuda, EverySetting) {
  const int64_t dims[][2] = {{2, 2}, {37, 22}, {80, 32}, {128, 128}};
  for (const auto& [dim, rotary] : dims) {
    for (const NormKind norm : kNorms) {
      for (const RopeKind rope : kRopes) {
        if (kThreadSanitizer && (dim != 128 || rope != RopeKind::half)) continue;
        const Problem<TypeParam> p({2, 3, 3, dim, rotary, norm, rope}, dim % 4 == 0);
        p.check_forward(norm == NormKind::layernorm);
        p.check_backward();
      }
    }
  }
}

TYPED_TEST(QkCuda, EveryHeadWidth) {
  const int64_t dims[][2] = {{1, 0},   {7, 2},    {8, 8},     {16, 12},   {33, 6},  {64, 64},
                             {96, 96}, {111, 50}, {192, 128}, {255, 254}, {256, 2}, {256, 256}};
  for (const auto& [dim, rotary] : dims) {
    if (kThreadSanitizer && dim != 111) continue;
    for (const RopeKind rope : {RopeKind::half, RopeKind::interleaved}) {
      const Problem<TypeParam> p(
          {1, 2, 5, dim, rotary, NormKind::layernorm, rotary == 0 ? RopeKind::none : rope});
      p.check_forward(true);
      p.check_backward();
    }
  }
}

// q, k and v in one launch: the bits of each alone.
TYPED_TEST(QkCuda, SeveralPartsAreTheSame) {
  using T = TypeParam;
  using A = acc_t<T>;
  for (const NormKind norm : {NormKind::none, NormKind::layernorm}) {
    const Problem<T> q({2, 9, 5, 40, 24, norm, RopeKind::half}),
        k({2, 9, 2, 40, 24, norm, RopeKind::half}),
        v({2, 9, 2, 40, 0, NormKind::none, RopeKind::none});
    const Problem<T>* problems[] = {&q, &k, &v};
    const int64_t chunks[] = {3, 2, 1};
    std::vector<T> x[3], dy[3], alone[3], together[3];
    std::vector<A> sums[3], joint_sums[3];
    QkParts<QkFwd> fwd;
    QkParts<QkBwd> bwd;
    QkGrads grads[3], joint_grads[3];
    for (int n = 0; n < 3; ++n) {
      const Problem<T>& p = *problems[n];
      x[n] = p.x.stored, dy[n] = p.dy.stored, alone[n] = together[n] = x[n];
      const QkFwd a{
          p.shape, {}, p.template view<const void*>(x[n]), p.template view<void*>(alone[n])};
      ASSERT_EQ(nullptr, qk_fwd_cuda(a, p.tokens, nullptr));
      if (n == 2) continue;
      fwd.part[fwd.count] = a;
      fwd.part[fwd.count++].y = p.template view<void*>(together[n]);
    }
    ASSERT_EQ(nullptr, qk_fwd_cuda(fwd, q.tokens, nullptr));
    for (int n = 0; n < 2; ++n) problems[n]->expect_same_heads(alone[n], together[n]);
    for (int n = 0; n < 3; ++n) {
      const Problem<T>& p = *problems[n];
      sums[n].assign(size_t(2 * chunks[n] * 40), A(-1)), joint_sums[n] = sums[n];
      const auto grads_in = [&](std::vector<A>& to) {
        return p.norm == NormKind::none ? QkGrads{}
                                        : QkGrads{to.data(), to.data() + chunks[n] * 40, chunks[n]};
      };
      grads[n] = grads_in(sums[n]), joint_grads[n] = grads_in(joint_sums[n]);
      QkBwd a{p.shape, p.template view<const void*>(dy[n]), p.template view<const void*>(x[n]),
              p.template view<void*>(alone[n])};
      ASSERT_EQ(nullptr, qk_bwd_cuda(a, &grads[n], p.tokens, nullptr));
      a.dx = p.template view<void*>(together[n]);
      bwd.part[bwd.count++] = a;
    }
    ASSERT_EQ(nullptr, qk_bwd_cuda(bwd, joint_grads, q.tokens, nullptr));
    for (int n = 0; n < 3; ++n) {
      problems[n]->expect_same_heads(alone[n], together[n]);
      EXPECT_EQ(sums[n], joint_sums[n]);
    }
    v.expect_same_heads(together[2], dy[2]);  // copied
  }
}

// Many tokens, few heads and many: teams that cross tokens and sequences from one item to the next.
TYPED_TEST(QkCuda, Shapes) {
  const int64_t shapes[][3] = {{70, 1, 1}, {1, 90, 1}, {3, 7, 2}, {2, 5, 13}, {1, 1, 32}};
  for (const auto& [batch, time, heads] : shapes) {
    if (kThreadSanitizer && heads != 13) continue;
    for (const NormKind norm : {NormKind::none, NormKind::rmsnorm}) {
      for (const bool sequence_first : {false, true}) {
        const Problem<TypeParam> p(
            {batch, time, heads, 24, 16, norm, RopeKind::half, sequence_first});
        p.check_forward(false);
        p.check_backward(132);
      }
    }
  }
}

TYPED_TEST(QkCuda, Unaligned) {
  for (const NormKind norm : {NormKind::none, NormKind::layernorm}) {
    const Case c{2, 2, 3, 64, 64, norm, RopeKind::half};
    Case moved = c;
    moved.shift = 1;
    const Problem<TypeParam> aligned(c), unaligned(moved);
    unaligned.check_forward(true);
    unaligned.check_backward();
  }
}

// The norm's parameters in the type of a model that is not the activations'.
TYPED_TEST(QkCuda, ParameterTypes) {
  const Case c{2, 3, 3, 40, 40, NormKind::gemma, RopeKind::half};
  const auto check = [](const auto& p) {
    p.check_forward(true);
    p.check_backward();
  };
  check(Problem<TypeParam, bf16>(c));
  if (kThreadSanitizer) return;
  check(Problem<TypeParam, double>(c));
  check(Problem<TypeParam, float>(c));
  check(Problem<TypeParam, f16>(c));
}

// A head's bits do not depend on where it lies.
TYPED_TEST(QkCuda, BitsDoNotDependOnAlignment) {
  using T = TypeParam;
  const Case c{2, 9, 3, 128, 96, NormKind::layernorm, RopeKind::half};
  Case moved_case = c;
  moved_case.shift = 3;
  const Problem<T> p(c), moved(moved_case);
  std::vector<T> x = p.x.stored, y = x, moved_x = x, moved_y = x;
  for (int64_t token = 0; token < p.tokens; ++token) {
    std::copy_n(&x[p.offset(x, token, 0)], 3 * 128, &moved_x[moved.offset(moved_x, token, 0)]);
  }
  const auto run = [](const Problem<T>& q, std::vector<T>& from, std::vector<T>& to) {
    const QkFwd a{q.shape, {}, q.template view<const void*>(from), q.template view<void*>(to)};
    ASSERT_EQ(nullptr, qk_fwd_cuda(a, q.tokens, nullptr));
  };
  run(p, x, y);
  run(moved, moved_x, moved_y);
  for (int64_t token = 0; token < p.tokens; ++token) {
    ASSERT_EQ(0, std::memcmp(&y[p.offset(y, token, 0)], &moved_y[moved.offset(moved_y, token, 0)],
                             size_t(3 * 128) * sizeof(T)));
  }
}

TYPED_TEST(QkCuda, NanStaysInItsHead) {
  using T = TypeParam;
  const Problem<T> p({1, 2, 4, 20, 12, NormKind::rmsnorm, RopeKind::half});
  std::vector<T> x = p.x.stored, y = x;
  x[p.offset(x, 1, 2) + 19] = store<T>(NAN);
  ASSERT_EQ(
      nullptr,
      qk_fwd_cuda(QkFwd{p.shape, {}, p.template view<const void*>(x), p.template view<void*>(y)},
                  p.tokens, nullptr));
  for (int64_t token = 0; token < 2; ++token) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < 20; ++i) {
        EXPECT_EQ(token == 1 && h == 2, std::isnan(double(to_acc(y[p.offset(y, token, h) + i]))));
      }
    }
  }
}

// Entries past rotary_dim are copied, infinities too.
TYPED_TEST(QkCuda, InfinityPastTheRotaryEntries) {
  using T = TypeParam;
  for (const RopeKind rope : {RopeKind::half, RopeKind::interleaved}) {
    const Problem<T> p({1, 1, 1, 20, 12, NormKind::none, rope});
    std::vector<T> x = p.x.stored;
    const int64_t at = p.offset(x, 0, 0);
    for (int i = 12; i < 20; ++i) x[at + i] = store<T>(INFINITY);
    ASSERT_EQ(
        nullptr,
        qk_fwd_cuda(QkFwd{p.shape, {}, p.template view<const void*>(x), p.template view<void*>(x)},
                    p.tokens, nullptr));
    for (int i = 0; i < 20; ++i) EXPECT_EQ(i >= 12, std::isinf(double(to_acc(x[at + i]))));
  }
}

TEST(QkCuda, NoTokens) {
  const Problem<float> p({1, 2, 2, 16, 16, NormKind::layernorm, RopeKind::half});
  std::vector<float> x = p.x.stored, dw(16, -1.0f), parts(16, -1.0f);
  EXPECT_EQ(nullptr,
            qk_fwd_cuda(QkFwd{p.shape, {}, p.view<const void*>(x), p.view<void*>(x)}, 0, nullptr));
  const QkBwd a{p.shape, p.view<const void*>(x), p.view<const void*>(x), p.view<void*>(x)};
  EXPECT_EQ(nullptr, qk_bwd_summed(a, 0, 1, nullptr, nullptr, nullptr, nullptr, nullptr));
  ASSERT_EQ(1, gpu_grad_chunks(0, 16, 2, 132));
  EXPECT_EQ(nullptr, qk_bwd_summed(a, 0, 1, parts.data(), nullptr, dw.data(), nullptr, nullptr));
  EXPECT_EQ(dw, std::vector<float>(16, 0.0f));
  EXPECT_EQ(x, p.x.stored);
}

TEST(QkCuda, RefusesHeadsTooWide) {
  const Problem<float> p({1, 1, 1, 600, 600, NormKind::none, RopeKind::half});
  std::vector<float> x = p.x.stored;
  EXPECT_NE(nullptr,
            qk_fwd_cuda(QkFwd{p.shape, {}, p.view<const void*>(x), p.view<void*>(x)}, 1, nullptr));
}

TEST(QkCuda, GradChunks) {
  EXPECT_EQ(1, gpu_grad_chunks(1, 128, 1, 132));
  EXPECT_EQ(2, gpu_grad_chunks(5, 128, 13, 132));
  EXPECT_EQ(528, gpu_grad_chunks(16384, 128, 32, 132));
}

}  // namespace
}  // namespace ckptfused
