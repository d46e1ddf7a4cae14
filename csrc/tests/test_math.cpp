#include <limits>

#include "kernels/cpu/subnormals.h"
#include "math/elementary.h"
#include "math/philox.h"
#include "math/types.h"
#include "tests/util.h"

namespace ckptfused {
namespace {

TEST(Philox, KnownAnswers) {
  const Philox4x32 seven = philox4x32<7>(0, 0, 0, 0, 0, 0);
  const Philox4x32 ten = philox4x32<10>(0, 0, 0, 0, 0, 0);
  const uint32_t want7[4] = {0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u};
  const uint32_t want10[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(seven.word[i], want7[i]);
    EXPECT_EQ(ten.word[i], want10[i]);
  }
}

// The value of a half or bfloat16 pattern from its fields.
double value_of(uint32_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = int(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(double(bits & ((1u << fraction_bits) - 1)), -fraction_bits);
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, exponent - bias);
}

template <typename T>
void check_every_pattern(int exponent_bits) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const T stored{uint16_t(bits)};
    const float got = to_acc(stored);
    const double want = value_of(bits, exponent_bits);
    T back;
    from_acc(got, back);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got) && std::isnan(to_acc(back))) << bits;
    } else {
      ASSERT_EQ(double(got), want) << bits;
      ASSERT_EQ(back.bits, bits);
    }
  }
}

// Between every two neighbours: the midpoint goes to the even one, a nudge decides otherwise.
template <typename T>
void check_rounding(uint32_t infinity) {
  for (uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const T low{uint16_t(bits)}, high{uint16_t(bits + 1)};
    const float middle = 0.5f * to_acc(low) + 0.5f * to_acc(high);
    const float nudged[3] = {std::nextafter(middle, 0.0f), middle,
                             std::nextafter(middle, INFINITY)};
    const uint32_t want[3] = {bits, bits + (bits & 1), bits + 1};
    for (int i = 0; i < 3; ++i) {
      T plus, minus;
      from_acc(nudged[i], plus);
      from_acc(-nudged[i], minus);
      ASSERT_EQ(plus.bits, want[i]) << bits << " " << i;
      ASSERT_EQ(minus.bits, want[i] | 0x8000u) << bits << " " << i;
    }
  }
}

TEST(SixteenBit, EveryPattern) {
  check_every_pattern<bf16>(8);
  check_every_pattern<f16>(5);
}

// Half's subnormals are normal floats: a thread that flushes the latter's subnormals keeps them.
TEST(SixteenBit, EveryPatternWhereFloatSubnormalsAreFlushed) {
#if defined(__SSE2__)
  const SubnormalModeGuard guard(SubnormalMode{0x8040});
  volatile float smallest = std::numeric_limits<float>::min();
  ASSERT_EQ(smallest * 0.5f, 0.0f);
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const float got = to_acc(f16{uint16_t(bits)});
    ASSERT_EQ(double(got), value_of(bits, 5)) << bits;
    ASSERT_EQ(store<f16>(got).bits, bits);
    ASSERT_EQ(store<f16>(to_acc(f16{uint16_t(bits | 0x8000u)})).bits, bits | 0x8000u);
  }
#endif
}

TEST(SixteenBit, RoundsToNearestEven) {
  check_rounding<bf16>(0x7f80);
  check_rounding<f16>(0x7c00);
}

TEST(SixteenBit, Overflow) {
  EXPECT_EQ(store<f16>(65519.0).bits, 0x7bff);
  EXPECT_EQ(store<f16>(65520.0).bits, 0x7c00);
  EXPECT_EQ(store<f16>(-1e30).bits, 0xfc00);
  EXPECT_EQ(store<f16>(1e-30).bits, 0);
  EXPECT_EQ(store<bf16>(3.4e38).bits, 0x7f80);
}

TEST(Elementary, ErrorsInUlps) {
  const auto ulps = [](float got, double want) {
    const float rounded = std::abs(float(want));
    const double ulp = std::nextafter(rounded, INFINITY) - double(rounded);
    return std::abs(double(got) - want) / ulp;
  };
  for (double x = -87.3; x < 88.7; x += 0.00317) {
    ASSERT_LE(ulps(exp_acc(float(x)), std::exp(double(float(x)))), 1.1) << x;
  }
  for (double x = -125.49; x < 127; x += 0.00317) {
    ASSERT_LE(ulps(exp2_softmax(float(x)), std::exp2(double(float(x)))), 3.0) << x;
  }
  for (double x = -12; x < 12; x += 0.00037) {
    ASSERT_LE(ulps(tanh_acc(float(x)), std::tanh(double(float(x)))), 2.0) << x;
  }
}

TEST(Elementary, Limits) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_acc(-inf), 0.0f);
  EXPECT_EQ(exp_acc(inf), inf);
  EXPECT_TRUE(std::isnan(exp_acc(NAN)));
  EXPECT_EQ(exp_acc(0.0f), 1.0f);
  for (const float low : {-125.6f, -126.0f, -127.0f, -1e30f, -inf}) {
    EXPECT_EQ(exp2_softmax(low), 0.0f) << low;
  }
  EXPECT_TRUE(std::isnan(exp2_softmax(NAN)));
  EXPECT_EQ(exp2_softmax(0.0f), 1.0f);
  EXPECT_EQ(tanh_acc(inf), 1.0f);
  EXPECT_EQ(tanh_acc(-inf), -1.0f);
  EXPECT_TRUE(std::isnan(tanh_acc(NAN)));
  EXPECT_EQ(sigmoid_acc(-inf), 0.0f);
  EXPECT_EQ(sigmoid_acc(inf), 1.0f);
}

}  // namespace
}  // namespace ckptfused
