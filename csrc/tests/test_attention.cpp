#include "kernels/cpu/attention.h"
#include "kernels/cpu/operands.h"

#include "math/softmax.h"
#include "tests/util.h"

namespace ckptfused {

#define CKPT_COMMA ,
CKPT_DECLARE_KERNEL(template <typename A CKPT_COMMA typename C> void, fwd_tile,
                    (const AttentionRule&, const ScoreTile&, A*, const SoftmaxRows<A>&, C*,
                     int64_t))
CKPT_DECLARE_KERNEL(template <typename A CKPT_COMMA typename C> void, bwd_tile,
                    (const AttentionRule&, const ScoreTile&, A*, A*, const A*, const A*,
                     const BackwardOperands<C>&))

// As CKPT_KERNELS, for an instance of a template, which needs its type spelt out.
#if CKPT_HAS_X86_TARGETS
#define CKPT_TEMPLATE_KERNELS(type, ...) \
  runnable_kernels<type>({&baseline::__VA_ARGS__, &avx2::__VA_ARGS__, &avx512::__VA_ARGS__})
#else
#define CKPT_TEMPLATE_KERNELS(type, ...) runnable_kernels<type>({&baseline::__VA_ARGS__})
#endif
template <typename A, typename C>
using FwdTile = void (*)(const AttentionRule&, const ScoreTile&, A*, const SoftmaxRows<A>&, C*,
                         int64_t);
template <typename A, typename C>
using BwdTile = void (*)(const AttentionRule&, const ScoreTile&, A*, A*, const A*, const A*,
                         const BackwardOperands<C>&);

namespace {

constexpr int64_t kState[2] = {987654321, 4};
// The tile's queries lie inside a longer sequence, and its keys in a whole and a partial tile.
constexpr int64_t kQuery = 250, kRows = 9, kQueries = kQuery + kRows, kKeys = 300, kHeadDim = 19;
constexpr double kScale = 0.8;
constexpr int64_t kDropoutRow = 7 * kQueries;
constexpr double kInf = INFINITY;

struct Setting {
  std::string name;
  bool causal = false;
  int64_t window = 0;
  double softcap = 0.0;
  MaskKind mask = MaskKind::none, padding = MaskKind::none;
  DType mask_dtype = DType::f32;
  bool shared = false;  // one mask row for all queries
  double p = 0.0;
};

std::vector<Setting> settings() {
  return {
      {"plain"},
      {"causal", true},
      {"window", false, 20},
      {"causal window, dropout", true, 270, 0.0, MaskKind::none, MaskKind::none, DType::f32, false,
       0.3},
      {"soft cap", false, 0, 1.5},
      {"soft cap, window, dropout", false, 30, 1.5, MaskKind::none, MaskKind::none, DType::f32,
       false, 0.3},
      {"keep", false, 0, 0.0, MaskKind::keep},
      {"drop, shared", false, 0, 0.0, MaskKind::drop, MaskKind::none, DType::f32, true},
      {"padding", true, 0, 0.0, MaskKind::none, MaskKind::drop},
      {"add, padding, dropout", false, 0, 2.0, MaskKind::add, MaskKind::keep, DType::f32, false,
       0.3},
      {"add bf16", false, 0, 0.0, MaskKind::add, MaskKind::none, DType::bf16},
      {"add f16", false, 0, 0.0, MaskKind::add, MaskKind::none, DType::f16},
      {"add f64, shared", true, 0, 0.0, MaskKind::add, MaskKind::none, DType::f64, true},
      {"all dropped", false, 0, 0.0, MaskKind::none, MaskKind::none, DType::f32, false, 1.0},
  };
}

// Two masks over all queries and keys, the first of them with keys two elements apart.
struct Masks {
  std::vector<uint8_t> bytes, padding;
  std::vector<double> f64;
  std::vector<float> f32;
  std::vector<bf16> b16;
  std::vector<f16> h16;

  Masks() {
    std::mt19937 engine(3);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < kQueries * kKeys * 2; ++i) {
      const bool blind = i / (2 * kKeys) == kQuery + 4;  // a query that sees nothing
      bytes.push_back(!blind && engine() % 4 != 0);
      const double x = bytes.back() ? double(to_acc(store<bf16>(normal(engine)))) : -kInf;
      f64.push_back(x);
      f32.push_back(float(x));
      b16.push_back(store<bf16>(x));
      h16.push_back(store<f16>(x));
    }
    for (int64_t j = 0; j < kKeys; ++j) padding.push_back(j < 270);
  }

  const void* data(const Setting& s) const {
    if (s.mask != MaskKind::add) return bytes.data();
    switch (s.mask_dtype) {
      case DType::f64:
        return f64.data();
      case DType::f32:
        return f32.data();
      case DType::bf16:
        return b16.data();
      default:
        return h16.data();
    }
  }

  AttentionRule rule(const Setting& s) const {
    AttentionRule rule;
    rule.keys = kKeys;
    rule.scale = kScale;
    rule.causal = s.causal;
    rule.window = s.window;
    rule.softcap = s.softcap;
    if (s.mask != MaskKind::none) {
      rule.mask = {s.mask, s.mask_dtype, data(s), s.shared ? 0 : 2 * kKeys, 2};
    }
    if (s.padding != MaskKind::none) rule.padding = {s.padding, DType::f32, padding.data(), 0, 1};
    rule.dropout = make_dropout(kState, s.p, 0, kKeys);
    rule.dropout_row = kDropoutRow;
    return rule;
  }

  // What is added to the logit of query i and key j.
  double bias(const Setting& s, int64_t i, int64_t j) const {
    double total = 0;
    const int64_t index = (s.shared ? 0 : i * 2 * kKeys) + 2 * j;
    if (s.mask == MaskKind::add) total += f64[index];
    if (s.mask == MaskKind::keep && !bytes[index]) total = -kInf;
    if (s.mask == MaskKind::drop && bytes[index]) total = -kInf;
    if (s.padding == MaskKind::keep && !padding[j]) total = -kInf;
    if (s.padding == MaskKind::drop && padding[j]) total = -kInf;
    if (s.causal && j > i) total = -kInf;
    if (s.window > 0 && (i - j >= s.window || (!s.causal && j - i >= s.window))) total = -kInf;
    return total;
  }
};

// Attention of the tile's queries, with every number written out. products, dprobs: [kRows, kKeys].
struct Naive {
  std::vector<double> logit, slope, factor, lse, prob;

  Naive(const Setting& s, const Masks& masks, const std::vector<double>& products) {
    const Dropout dropout = make_dropout(kState, s.p, 0, kKeys);
    for (int64_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (int64_t j = 0; j < kKeys; ++j) {
        const double z = kScale * products[r * kKeys + j],
                     t = s.softcap > 0 ? std::tanh(z / s.softcap) : 0;
        const double capped = s.softcap > 0 ? s.softcap * t : z;
        const double bias = masks.bias(s, kQuery + r, j);
        logit.push_back(bias == -kInf ? bias : capped + bias);
        slope.push_back(1 - t * t);
        const bool keep = !dropout.active() || dropout.keep(kDropoutRow + kQuery + r, j);
        factor.push_back(keep ? 65536.0 / (65536.0 - dropout.threshold) : 0.0);
        sum += std::exp(logit.back());
      }
      lse.push_back(std::log(sum));
      for (int64_t j = 0; j < kKeys; ++j) {
        prob.push_back(sum == 0 ? 0.0 : std::exp(logit[r * kKeys + j]) / sum);
      }
    }
  }
};

int64_t keys_of(int64_t key) {
  return std::min(kKeyTile, kKeys - key);
}

ScoreTile tile_at(int64_t key) {
  return {kQuery, kRows, key, (keys_of(key) + 31) / 32 * 32, kKeyTile};
}

// Columns of a [kRows, kKeys] matrix as the rows of a tile. What is beyond the keys is not taken.
template <typename A>
std::vector<A> cut(const std::vector<A>& matrix, const ScoreTile& tile) {
  std::vector<A> cells(kRows * tile.stride, A(-77));
  for (int64_t r = 0; r < kRows; ++r) {
    std::copy_n(&matrix[r * kKeys + tile.key], keys_of(tile.key), &cells[r * tile.stride]);
  }
  return cells;
}

// Columns beyond the keys have no probability and no gradient.
template <typename A>
void expect_padding(const std::vector<A>& cells, const ScoreTile& tile, const std::string& what) {
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t j = keys_of(tile.key); j < tile.cols; ++j) {
      ASSERT_EQ(double(to_acc(cells[r * tile.stride + j])), 0.0) << what;
    }
  }
}

using AccTypes = testing::Types<double, float>;
template <typename A>
class Attention : public testing::Test {};
TYPED_TEST_SUITE(Attention, AccTypes);

TYPED_TEST(Attention, ForwardMatchesTheWholeSoftmax) {
  using A = TypeParam;
  using Fwd = FwdTile<A, A>;
  const Masks masks;
  const auto products = random_values<A>(kRows * kKeys, 1);
  const auto v = random_values<A>(kKeys * kHeadDim, 2);
  for (const Setting& s : settings()) {
    const Naive naive(s, masks, products.exact);
    std::vector<double> want(kRows * kHeadDim);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < kKeys; ++j) {
        const double weight = naive.prob[r * kKeys + j] * naive.factor[r * kKeys + j];
        for (int64_t d = 0; s.p < 1 && d < kHeadDim; ++d) {
          want[r * kHeadDim + d] += weight * v.exact[j * kHeadDim + d];
        }
      }
    }
    for (const auto& kernel : CKPT_TEMPLATE_KERNELS(Fwd, fwd_tile<A, A>)) {
      std::vector<A> max(kRows, A(-kInf)), sum(kRows), out(kRows * kHeadDim), lse(kRows);
      const SoftmaxRows<A> state{max.data(), sum.data(), out.data(), kHeadDim};
      const AttentionRule rule = masks.rule(s);
      for (int64_t key = 0; key < kKeys; key += kKeyTile) {
        const ScoreTile tile = tile_at(key);
        std::vector<A> scores = cut(products.stored, tile);
        kernel.run(rule, tile, scores.data(), state, scores.data(), tile.stride);
        expect_padding(scores, tile, s.name);
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t j = 0; j < keys_of(key); ++j) {
            for (int64_t d = 0; d < kHeadDim; ++d) {
              out[r * kHeadDim + d] +=
                  scores[r * tile.stride + j] * v.stored[(key + j) * kHeadDim + d];
            }
          }
        }
      }
      std::vector<A> o(kRows * kHeadDim);
      attention_finish_rows<A>(state, rule, kRows, o.data(), kHeadDim, lse.data());
      const std::string what = s.name + " on " + kernel.target;
      expect_close(o.data(), want, 4.0, double(kKeys), what);
      for (int64_t r = 0; r < kRows; ++r) {
        if (naive.lse[r] == -kInf) {
          EXPECT_EQ(lse[r], A(-kInf)) << what;
        } else {
          expect_close(&lse[r], {naive.lse[r]}, 8.0, 40.0, what);
        }
      }
    }
  }
}

TYPED_TEST(Attention, BackwardMatchesTheFormula) {
  using A = TypeParam;
  using Bwd = BwdTile<A, A>;
  const Masks masks;
  const auto products = random_values<A>(kRows * kKeys, 1);
  const auto dprobs = random_values<A>(kRows * kKeys, 4);
  const auto delta = random_values<A>(kRows, 5);
  for (const Setting& s : settings()) {
    const Naive naive(s, masks, products.exact);
    const std::vector<A> lse(naive.lse.begin(), naive.lse.end());
    for (const auto& kernel : CKPT_TEMPLATE_KERNELS(Bwd, bwd_tile<A, A>)) {
      for (int64_t key = 0; key < kKeys; key += kKeyTile) {
        const ScoreTile tile = tile_at(key);
        std::vector<A> scores = cut(products.stored, tile), grads = cut(dprobs.stored, tile);
        kernel.run(masks.rule(s), tile, scores.data(), grads.data(), lse.data(),
                   delta.stored.data(), {});
        expect_padding(scores, tile, s.name);
        expect_padding(grads, tile, s.name);
        for (int64_t r = 0; r < kRows; ++r) {
          std::vector<double> probs, dscores;
          for (int64_t i = r * kKeys + key; i < r * kKeys + key + keys_of(key); ++i) {
            const double factor = s.p < 1 ? naive.factor[i] : 0.0;
            probs.push_back(naive.prob[i] * factor);
            dscores.push_back(kScale * naive.prob[i] * (dprobs.exact[i] * factor - delta.exact[r]) *
                              naive.slope[i]);
          }
          const std::string what = s.name + " on " + kernel.target;
          expect_close(&scores[r * tile.stride], probs, largest(probs), 40.0, what);
          expect_close(&grads[r * tile.stride], dscores, largest(dscores), 60.0, what);
        }
      }
    }
  }
}

// What products take in bfloat16 are the float results, rounded: rows in pairs, an odd one beside
// zeros.
TEST(AttentionRows, OperandsAreRoundedResults) {
  const Masks masks;
  const auto products = random_values<float>(kRows * kKeys, 1);
  const auto dprobs = random_values<float>(kRows * kKeys, 4);
  const auto delta = random_values<float>(kRows, 5);
  const std::vector<float> lse(kRows, 6.0f);
  const ScoreTile tile = tile_at(kKeyTile);
  const auto rounded = [](float x) { return to_acc(store<bf16>(x)); };
  for (const Setting& s : settings()) {
    const AttentionRule rule = masks.rule(s);
    std::vector<float> scores = cut(products.stored, tile), again = scores;
    std::vector<float> max(kRows, -INFINITY), sum(kRows), out(kRows * kHeadDim),
        max2 = max, sum2 = sum, out2 = out;
    std::vector<bf16> probs(kRows * tile.cols);
    attention_fwd_tile(rule, tile, scores.data(), {max.data(), sum.data(), out.data(), kHeadDim},
                       scores.data(), tile.stride);
    attention_fwd_tile(rule, tile, again.data(), {max2.data(), sum2.data(), out2.data(), kHeadDim},
                       probs.data(), tile.cols);
    EXPECT_EQ(max, max2);
    EXPECT_EQ(sum, sum2);
    std::vector<float> back = cut(products.stored, tile), grads = cut(dprobs.stored, tile);
    std::vector<float> back2 = back, grads2 = grads;
    const int64_t even = kRows + kRows % 2;
    std::vector<bf16> right(even * tile.cols), right_grads = right, left_grads = right;
    attention_bwd_tile<float, float>(rule, tile, back.data(), grads.data(), lse.data(),
                                     delta.stored.data(), {});
    attention_bwd_tile<float, bf16>(rule, tile, back2.data(), grads2.data(), lse.data(),
                                    delta.stored.data(),
                                    {right.data(), right_grads.data(), left_grads.data()});
    for (int64_t r = 0; r < even; ++r) {
      for (int64_t j = 0; j < tile.cols; ++j) {
        const int64_t i = r * tile.stride + j, pair = ((r / 2) * tile.cols + j) * 2 + r % 2;
        const bool real = r < kRows;
        ASSERT_EQ(to_acc(right[pair]), real ? rounded(back[i]) : 0.0f) << s.name;
        ASSERT_EQ(to_acc(right_grads[pair]), real ? rounded(grads[i]) : 0.0f) << s.name;
        if (!real) continue;
        ASSERT_EQ(to_acc(probs[r * tile.cols + j]), rounded(scores[i])) << s.name;
        ASSERT_EQ(to_acc(left_grads[r * tile.cols + j]), rounded(grads[i])) << s.name;
      }
    }
  }
}

TEST(AttentionRows, MaskedLogitsAreMaskedWhateverTheyAre) {
  for (const float logit : {NAN, INFINITY, -INFINITY, 1.0f}) {
    EXPECT_EQ(masked_logit(logit, -INFINITY), -INFINITY);
  }
  EXPECT_TRUE(std::isnan(masked_logit(NAN, 0.0f)));
}

TEST(AttentionRows, NanMakesItsRowNan) {
  const ScoreTile tile{0, 2, 0, 32, 32};
  AttentionRule rule;
  rule.keys = 3;
  std::vector<float> scores(64, 9.0f), max(2, -INFINITY), sum(2), out(2), o(2), lse(2);
  for (const auto& [i, x] : {std::pair(0, 1.0f), {1, NAN}, {2, 2.0f}, {32, 1.0f}, {33, 0.0f}}) {
    scores[i] = x;
  }
  scores[34] = 2.0f;
  const SoftmaxRows<float> state{max.data(), sum.data(), out.data(), 1};
  attention_fwd_tile(rule, tile, scores.data(), state, scores.data(), 32);
  out = {scores[0] + scores[1] + scores[2], scores[32] + scores[33] + scores[34]};
  attention_finish_rows<float>(state, rule, 2, o.data(), 1, lse.data());
  EXPECT_TRUE(std::isnan(o[0]) && std::isnan(lse[0]));
  EXPECT_FLOAT_EQ(o[1], 1.0f);
}

// Differences of logits are taken before anything is rounded that is as large as they are.
TEST(AttentionRows, HugeLogits) {
  const ScoreTile tile{0, 1, 0, 32, 32};
  AttentionRule rule;
  rule.keys = 32;
  rule.scale = 1e8;
  std::vector<float> scores(32, 1.0f), max(1, -INFINITY), sum(1), out(1), o(1), lse(1);
  scores[5] = scores[9] = 12.3f;
  attention_fwd_tile(rule, tile, scores.data(), {max.data(), sum.data(), out.data(), 1},
                     scores.data(), 32);
  EXPECT_EQ(scores[5], 1.0f);
  EXPECT_EQ(scores[9], 1.0f);
  EXPECT_EQ(sum[0], 2.0f);
  attention_finish_rows<float>({max.data(), sum.data(), out.data(), 1}, rule, 1, o.data(), 1,
                               lse.data());
  EXPECT_FLOAT_EQ(lse[0], 12.3f * 1e8f);
}

TEST(AttentionRows, VisibleKeys) {
  const auto expect = [](KeyRange got, int64_t begin, int64_t end) {
    EXPECT_EQ(got.begin, begin);
    EXPECT_EQ(got.end, end);
  };
  expect(visible_keys(5, 9, false, 0), 0, 9);
  expect(visible_keys(5, 9, true, 0), 0, 6);
  expect(visible_keys(5, 9, true, 2), 4, 6);
  expect(visible_keys(5, 9, false, 2), 4, 7);
  expect(visible_keys(8, 9, false, 3), 6, 9);
  expect(visible_keys(20, 9, true, 2), 9, 9);
}

template <typename T>
class AttentionCopies : public testing::Test {};
using StorageTypes = testing::Types<double, float, bf16, f16>;
TYPED_TEST_SUITE(AttentionCopies, StorageTypes);

TYPED_TEST(AttentionCopies, RoundTripAndDelta) {
  using T = TypeParam;
  constexpr int64_t kStride = kHeadDim + 4;
  const auto x = random_values<T>(kRows * kStride, 1);
  std::vector<acc_t<T>> wide(kRows * kHeadDim), delta(kRows);
  std::vector<T> back(kRows * kStride, store<T>(9.0));
  left_rows<T>(x.stored.data(), kStride, kRows, kHeadDim, wide.data(), kRows, kHeadDim);
  store_tile<T>(wide.data(), kHeadDim, kRows, kHeadDim, back.data(), kStride);
  attention_delta_rows<T>(x.stored.data(), kStride, x.stored.data(), kStride, kRows, kHeadDim,
                          delta.data());
  for (int64_t r = 0; r < kRows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < kStride; ++i) {
      const double want = i < kHeadDim ? x.exact[r * kStride + i] : 9.0;
      EXPECT_EQ(double(to_acc(back[r * kStride + i])), want);
      if (i < kHeadDim) squares += want * want;
    }
    expect_close(&delta[r], {squares}, squares, double(kHeadDim), "delta");
  }
}

}  // namespace
}  // namespace ckptfused
