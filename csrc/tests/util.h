#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/target.h"
#include "kernels/norm.h"
#include "math/types.h"

namespace ckptfused {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Values of a storage type, with the doubles that they stand for.
template <typename T>
struct Values {
  std::vector<T> stored;
  std::vector<double> exact;
};

template <typename T>
T store(double x) {
  T y;
  from_acc(acc_t<T>(x), y);
  return y;
}

template <typename T>
Values<T> random_values(int64_t n, uint32_t seed, double mean = 0.3) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal(mean, 1.0);
  Values<T> v;
  for (int64_t i = 0; i < n; ++i) {
    v.stored.push_back(store<T>(normal(engine)));
    v.exact.push_back(double(to_acc(v.stored.back())));
  }
  return v;
}

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<f16>() {
  return DType::f16;
}

// A norm's weight or bias as the model holds it.
template <typename T>
NormParam norm_param(const Values<T>& values) {
  return {values.stored.data(), dtype_of<T>()};
}

// Half an ulp of storage, relative: what one rounding may cost.
template <typename T>
constexpr double unit_roundoff() {
  switch (dtype_of<T>()) {
    case DType::f64:
      return 0x1p-53;
    case DType::f32:
      return 0x1p-24;
    case DType::bf16:
      return 0x1p-8;
    default:
      return 0x1p-11;  // of normal numbers; half precision also has 2^-25 absolute
  }
}

// got[i] is want[i] after `roundings` to T and `terms` roundings, in the accumulation type, of
// values as large as `scale`.
template <typename T>
void expect_close(const T* got, const std::vector<double>& want, double scale, double terms,
                  const std::string& what, double roundings = 1) {
  const double smallest = dtype_of<T>() == DType::f16 ? 0x1p-25 : 0.0;  // half a subnormal step
  const double acc = terms * scale * unit_roundoff<acc_t<T>>();
  for (size_t i = 0; i < want.size(); ++i) {
    const double value = double(to_acc(got[i]));
    const double once = smallest + unit_roundoff<T>() * (std::abs(want[i]) + acc);
    const double allowed = acc + roundings * once;
    // Written so that a NaN fails.
    ASSERT_TRUE(std::abs(value - want[i]) <= allowed)
        << what << ": element " << i << " is " << value << ", expected " << want[i] << " +- "
        << allowed;
  }
}

// Two kernels' results for the same inputs: each may be off by what expect_close allows.
template <typename T>
void expect_alike(const T* got, const T* other, size_t n, double scale, double terms,
                  const std::string& what) {
  std::vector<double> want;
  for (size_t i = 0; i < n; ++i) want.push_back(double(to_acc(other[i])));
  expect_close(got, want, scale, 2 * terms, what, 2);
}

inline double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double v : values) most = std::max(most, std::abs(v));
  return most;
}
inline std::vector<double> row_of(const std::vector<double>& matrix, int64_t row, int64_t cols) {
  return {matrix.begin() + row * cols, matrix.begin() + (row + 1) * cols};
}

// The row and compute types that kernels take.
template <typename Row, typename Compute>
struct TypePair {
  using R = Row;
  using P = Compute;
};
using TypePairs =
    testing::Types<TypePair<double, double>, TypePair<float, float>, TypePair<bf16, bf16>,
                   TypePair<f16, f16>, TypePair<float, bf16>, TypePair<float, f16>>;

// A kernel of an .inl file, declared for each target and listed for those that this machine runs:
//   CKPT_DECLARE_KERNEL(bool, norm_fwd, (const NormFwd&, int64_t, int64_t, RowScratch&))
//   for (const auto& kernel : CKPT_KERNELS(norm_fwd)) kernel.run(...)
#if CKPT_HAS_X86_TARGETS
#define CKPT_DECLARE_KERNEL(result, name, args) \
  namespace baseline {                          \
  result name args;                             \
  }                                             \
  namespace avx2 {                              \
  result name args;                             \
  }                                             \
  namespace avx512 {                            \
  result name args;                             \
  }
#define CKPT_KERNELS(name) runnable_kernels({&baseline::name, &avx2::name, &avx512::name})
#else
#define CKPT_DECLARE_KERNEL(result, name, args) \
  namespace baseline {                          \
  result name args;                             \
  }
#define CKPT_KERNELS(name) runnable_kernels({&baseline::name})
#endif

template <typename Function>
struct TargetKernel {
  std::string target;
  Function run;
};
template <typename Function>
std::vector<TargetKernel<Function>> runnable_kernels(std::initializer_list<Function> functions) {
  const char* names[] = {"baseline", "avx2", "avx512"};
  std::vector<TargetKernel<Function>> found;
  for (const Function function : functions) {
    if (int(found.size()) > int(cpu_target())) break;
    found.push_back({names[found.size()], function});
  }
  return found;
}

// Widths that leave remainders in every vector width, and one of whole vectors.
inline const std::vector<int64_t>& odd_widths() {
  static const std::vector<int64_t> widths = {1, 2, 7, 8, 15, 33, 63, 64, 111, 257, 1024};
  return widths;
}

}  // namespace ckptfused
