#include <cstring>
#include <limits>

#include "kernels/cpu/activation.h"
#include "kernels/cuda/activation.h"
#include "tests/cuda/rows_util.h"
#include "tests/naive_activation.h"

namespace ckptfused {
namespace {

using Case = NamedActivation;
const Case kSwiglu = *find_activation("swiglu");

constexpr int64_t kState[2] = {0x123456789abcdef, 42};
constexpr int64_t kMaskCols = 30000;

// A tile of a hidden tensor: g and u are column slices of one buffer, dh and h of another, starting
// `shift` elements behind a 16-byte boundary.
template <typename T>
struct Problem {
  Case kind;
  int64_t rows, cols, stride;
  ActivationShape shape{};
  Values<T> gu, dh;
  int64_t first;  // of g, and of dh; u follows after `cols`, rounded up to a group

  Problem(const Case& kind, int64_t rows, int64_t cols, double p, int64_t col0, int64_t shift)
      : kind(kind), rows(rows), cols(cols) {
    stride = 2 * ((cols + 7) / 8 * 8 + 8) + (shift != 0 ? 1 : 0);
    gu = random_values<T>(rows * stride + 32, 1, 0.0);
    dh = random_values<T>(rows * stride + 32, 2);
    const uintptr_t past = reinterpret_cast<uintptr_t>(gu.stored.data()) % 16 / sizeof(T);
    EXPECT_EQ(past, reinterpret_cast<uintptr_t>(dh.stored.data()) % 16 / sizeof(T));
    first = (past == 0 ? 0 : int64_t(16 / sizeof(T) - past)) + shift;
    shape.dtype = dtype_of<T>();
    shape.act = kind.act;
    shape.gated = kind.gated;
    shape.coefficients = coefficients_for<T>(kind.act);
    shape.cols = cols;
    shape.row0 = 4;
    shape.col0 = col0;
    shape.rows = {(rows + 6) / 3 + 1, 3};           // [T, B = 3]
    shape.dropout = make_dropout(p, 2, kMaskCols);  // without its state, which the kernel reads
  }
  int64_t g_at(int64_t row, int64_t col) const { return first + row * stride + col; }
  int64_t u_at(int64_t row, int64_t col) const { return g_at(row, col) + (cols + 7) / 8 * 8; }

  template <typename Pointer>
  Strided<Pointer> slice(std::vector<T>& buffer, int64_t start) const {
    return {buffer.data() + start, stride};
  }
  ActivationFwd fwd(std::vector<T>& in, std::vector<T>& out) const {
    return {shape, slice<const void*>(in, g_at(0, 0)), slice<const void*>(in, u_at(0, 0)),
            slice<void*>(out, g_at(0, 0))};
  }
  // h over dh, dg over g and du over u where the buffers are the same.
  ActivationBwd bwd(std::vector<T>& in, std::vector<T>& grad, std::vector<T>& out_h,
                    std::vector<T>& out) const {
    ActivationBwd a{shape,
                    slice<const void*>(in, g_at(0, 0)),
                    slice<const void*>(in, u_at(0, 0)),
                    slice<const void*>(grad, g_at(0, 0)),
                    slice<void*>(out_h, g_at(0, 0)),
                    {},
                    slice<void*>(out, u_at(0, 0))};
    if (kind.gated) a.dg = slice<void*>(out, g_at(0, 0));
    return a;
  }

  // CPU kernels are given the state itself.
  template <typename Args>
  static Args on_cpu(Args a) {
    a.dropout = with_state(a.dropout, kState);
    return a;
  }

  struct Want {
    double h, dg, du;
  };
  Want want(int64_t row, int64_t col) const {
    const int64_t n = shape.row0 + row;
    const Dropout dropout = with_state(shape.dropout, kState);
    const int64_t logical = (n % 3) * shape.rows.outer + n / 3;
    const bool keep = !dropout.active() || dropout.keep(logical, shape.col0 + col);
    const double mask = keep ? 65536.0 / (65536.0 - dropout.threshold) : 0.0;
    const double u = gu.exact[u_at(row, col)], x = kind.gated ? gu.exact[g_at(row, col)] : u;
    const double up = kind.gated ? u : 1.0, d = keep ? dh.exact[g_at(row, col)] * mask : 0.0;
    const double value = naive(kind.act, x), grad = naive_grad(kind.act, x);
    return {keep ? value * up * mask : 0.0, d * up * grad, d * (kind.gated ? value : grad)};
  }

  // Checks one output in its buffer, against the definition and the CPU kernel's, and counts its
  // elements off as looked at.
  void expect(const std::vector<T>& got, const std::vector<T>& cpu, double Want::* member,
              bool behind_g, std::vector<bool>& seen) const {
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> wanted;
      for (int64_t col = 0; col < cols; ++col) wanted.push_back(want(row, col).*member);
      const int64_t start = behind_g ? u_at(row, 0) : g_at(row, 0);
      const double scale = 4 + 4 * largest(wanted);
      const std::string what = std::string(kind.name) + ", width " + std::to_string(cols);
      expect_close(got.data() + start, wanted, scale, 12, what);
      expect_alike(got.data() + start, cpu.data() + start, size_t(cols), scale, 12, what + ", CPU");
      for (int64_t col = 0; col < cols; ++col) seen[start + col] = true;
    }
  }
  // The elements that were not looked at are as before.
  static void expect_rest_untouched(const std::vector<T>& got, const std::vector<T>& before,
                                    const std::vector<bool>& seen) {
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(seen[i] || std::memcmp(&got[i], &before[i], sizeof(T)) == 0) << i;
    }
  }

  void check_forward() const {
    std::vector<T> in = gu.stored, out = dh.stored, cpu = dh.stored;
    ASSERT_EQ(nullptr, activation_fwd_cuda(fwd(in, out), kState, rows, nullptr));
    activation_fwd_rows(on_cpu(fwd(in, cpu)), 0, rows);
    std::vector<bool> seen(out.size());
    expect(out, cpu, &Want::h, false, seen);
    expect_rest_untouched(out, dh.stored, seen);
    // h over u.
    ActivationFwd over = fwd(in, in);
    over.h = slice<void*>(in, u_at(0, 0));
    ASSERT_EQ(nullptr, activation_fwd_cuda(over, kState, rows, nullptr));
    for (int64_t row = 0; row < rows; ++row) {
      ASSERT_EQ(0, std::memcmp(&in[u_at(row, 0)], &out[g_at(row, 0)], size_t(cols) * sizeof(T)));
    }
  }
  void check_backward_in_place() const {
    std::vector<T> in = gu.stored, grad = dh.stored, cpu_in = in, cpu_grad = grad;
    ASSERT_EQ(nullptr, activation_bwd_cuda(bwd(in, grad, grad, in), kState, rows, nullptr));
    activation_bwd_rows(on_cpu(bwd(cpu_in, cpu_grad, cpu_grad, cpu_in)), 0, rows);
    std::vector<bool> seen_in(in.size()), seen_grad(in.size());
    expect(grad, cpu_grad, &Want::h, false, seen_grad);
    expect(in, cpu_in, &Want::du, true, seen_in);
    if (kind.gated) expect(in, cpu_in, &Want::dg, false, seen_in);
    expect_rest_untouched(in, gu.stored, seen_in);
    expect_rest_untouched(grad, dh.stored, seen_grad);
  }
};

// To ThreadSanitizer one activation is as good as another: which thread writes what depends on
// whether there is a gate.
bool runs(const Case& kind) {
  return !kThreadSanitizer || kind.act == Activation::silu;
}

template <typename T>
class ActivationCuda : public testing::Test {};
using StorageTypes = std::conditional_t<kThreadSanitizer, testing::Types<bf16>,
                                        testing::Types<double, float, bf16, f16>>;
TYPED_TEST_SUITE(ActivationCuda, StorageTypes);

TYPED_TEST(ActivationCuda, EveryActivation) {
  for (const Case& kind : kActivations) {
    if (!runs(kind)) continue;
    for (const double p : {0.0, 0.1}) {
      if (kThreadSanitizer && p == 0.0) continue;
      const Problem<TypeParam> problem(kind, 5, 111, p, 16, 0);
      problem.check_forward();
      problem.check_backward_in_place();
    }
  }
}

// Aligned and not, in tiles whose first column is a multiple of eight or not.
TYPED_TEST(ActivationCuda, EveryWidthAndAlignment) {
  for (const int64_t cols : odd_widths()) {
    if (kThreadSanitizer && cols != 111) continue;
    for (const int64_t shift : {0, 1}) {
      const Problem<TypeParam> problem(kSwiglu, 3, cols, 0.1, shift == 0 ? 8 : 13, shift);
      problem.check_forward();
      problem.check_backward_in_place();
    }
  }
}

// Several blocks; threads that cross rows between their groups, many rows or one at a time.
TYPED_TEST(ActivationCuda, LargeShapes) {
  const int64_t shapes[][2] = {{1500, 1}, {700, 9}, {41, 257}, {2, 20000}};
  for (const auto& [rows, cols] : shapes) {
    if (kThreadSanitizer && rows != 41) continue;
    const Problem<TypeParam> problem(kSwiglu, rows, cols, 0.1, 0, 0);
    problem.check_forward();
    problem.check_backward_in_place();
  }
}

// Backward makes the h that forward made, to the bit, and each output whether or not the others are
// wanted and wherever they lie.
TYPED_TEST(ActivationCuda, OutputsDoNotDependOnEachOther) {
  using T = TypeParam;
  for (const Case& kind : kActivations) {
    if (!runs(kind)) continue;
    const Problem<T> p(kind, 3, 250, 0.1, 0, 0);
    std::vector<T> in = p.gu.stored, grad = p.dh.stored;
    std::vector<T> forward(in.size()), h = forward, out = forward, alone = forward;
    ASSERT_EQ(nullptr, activation_fwd_cuda(p.fwd(in, forward), kState, p.rows, nullptr));
    ASSERT_EQ(nullptr, activation_bwd_cuda(p.bwd(in, grad, h, out), kState, p.rows, nullptr));
    EXPECT_EQ(0, std::memcmp(h.data(), forward.data(), h.size() * sizeof(T))) << kind.name;

    ActivationBwd a = p.bwd(in, grad, h, alone);
    a.h = {};
    for (const bool gate : {false, true}) {
      if (gate && !kind.gated) continue;
      ActivationBwd one = a;
      (gate ? one.du : one.dg) = {};
      ASSERT_EQ(nullptr, activation_bwd_cuda(one, kState, p.rows, nullptr));
    }
    EXPECT_EQ(0, std::memcmp(alone.data(), out.data(), out.size() * sizeof(T))) << kind.name;
    EXPECT_EQ(0, std::memcmp(in.data(), p.gu.stored.data(), in.size() * sizeof(T)));
    EXPECT_EQ(0, std::memcmp(grad.data(), p.dh.stored.data(), in.size() * sizeof(T)));
  }
}

// The sums of xIELU's coefficients' gradients: of one block, of several, of a row and more.
TYPED_TEST(ActivationCuda, SumsOfCoefficients) {
  using T = TypeParam;
  using A = acc_t<T>;
  if (kThreadSanitizer) return;
  const int64_t shapes[][2] = {{1, 1}, {5, 111}, {41, 257}, {3, 9000}};
  for (const auto& [rows, cols] : shapes) {
    const Problem<T> p(*find_activation("xielu"), rows, cols, 0.1, 0, 0);
    double want[4] = {};
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        const double x = p.gu.exact[p.u_at(row, col)];
        // du without its factor: d of what dropout keeps.
        const double d = p.want(row, col).du / naive_grad(Activation::xielu, x);
        want[0] += x > 0 ? d * x * x : 0;
        want[1] += x > 0 ? 0 : d * (std::expm1(x) - x);
        want[2] += d * x;
      }
    }
    const int64_t count = coefficient_sums(rows, cols);
    for (const bool cuda : {false, true}) {
      std::vector<T> in = p.gu.stored, grad = p.dh.stored;
      std::vector<A> sums(size_t(count * 4), A(0));
      ActivationBwd a = p.bwd(in, grad, grad, in);
      a.sums = sums.data();
      if (cuda) {
        ASSERT_EQ(nullptr, activation_bwd_cuda(a, kState, rows, nullptr));
      } else {
        activation_bwd_rows(p.on_cpu(a), 0, rows);
      }
      for (int k = 0; k < 4; ++k) {
        double got = 0, size = 1;
        for (int64_t i = 0; i < count; ++i) {
          got += double(sums[i * 4 + k]);
          size += std::abs(double(sums[i * 4 + k]));
        }
        // Each element's rounding, and that of the additions of a row or block.
        const double allowed = 64 * size * std::numeric_limits<A>::epsilon();
        EXPECT_NEAR(want[k], got, allowed + 4e-6 * (sizeof(A) == 4) * size) << rows << " " << cols;
      }
    }
  }
}

TYPED_TEST(ActivationCuda, DropsAllAtProbabilityOne) {
  using T = TypeParam;
  Problem<T> p(kSwiglu, 2, 33, 1.0, 0, 0);
  std::vector<T> in = p.gu.stored, out = p.dh.stored;
  in[p.u_at(0, 3)] = store<T>(std::numeric_limits<double>::infinity());
  in[p.g_at(0, 4)] = store<T>(std::numeric_limits<double>::quiet_NaN());
  ASSERT_EQ(nullptr, activation_fwd_cuda(p.fwd(in, out), kState, p.rows, nullptr));
  for (int i = 0; i < 33; ++i) EXPECT_EQ(0.0, double(to_acc(out[p.g_at(0, i)])));
}

TYPED_TEST(ActivationCuda, NanAndLargeValues) {
  using T = TypeParam;
  for (const Case& kind : kActivations) {
    if (!runs(kind)) continue;
    Problem<T> p(kind, 1, 16, 0.0, 0, 0);
    std::vector<T> in = p.gu.stored, grad = p.dh.stored, h = grad, out = in;
    const double edges[] = {std::numeric_limits<double>::quiet_NaN(), 0.0, -0.0, 60.0, -60.0};
    for (int i = 0; i < 5; ++i) {
      grad[p.g_at(0, i)] = store<T>(1.0);
      in[p.u_at(0, i)] = store<T>(kind.gated ? 1.0 : edges[i]);
      if (kind.gated) in[p.g_at(0, i)] = store<T>(edges[i]);
    }
    ASSERT_EQ(nullptr, activation_bwd_cuda(p.bwd(in, grad, h, out), nullptr, 1, nullptr));
    const auto value = [&](int i) { return double(to_acc(h[p.g_at(0, i)])); };
    EXPECT_TRUE(std::isnan(value(0))) << kind.name;
    const AtEdges at = at_edges(kind.act);
    EXPECT_EQ(at.zero, value(1)) << kind.name;
    EXPECT_EQ(at.zero, value(2)) << kind.name;
    EXPECT_EQ(double(round_to<T>(acc_t<T>(at.sixty))), value(3)) << kind.name;
    EXPECT_NEAR(at.below, value(4), 1e-20) << kind.name;
    const auto grad_at = [&](int i) {
      return double(to_acc(out[kind.gated ? p.g_at(0, i) : p.u_at(0, i)]));
    };
    EXPECT_EQ(at.slope_at_sixty, grad_at(3)) << kind.name;
    EXPECT_NEAR(at.slope_below, grad_at(4), 1e-20) << kind.name;
  }
}

TEST(ActivationCuda, NothingToDo) {
  ActivationFwd fwd{};
  fwd.gated = true;
  fwd.cols = 8;
  EXPECT_EQ(nullptr, activation_fwd_cuda(fwd, nullptr, 0, nullptr));
  fwd.cols = 0;
  EXPECT_EQ(nullptr, activation_fwd_cuda(fwd, nullptr, 8, nullptr));
  EXPECT_EQ(nullptr, activation_bwd_cuda(ActivationBwd{}, nullptr, 8, nullptr));
}

TEST(ActivationCuda, RefusesGatedSquare) {
  ActivationFwd a{};
  a.act = Activation::relu2;
  a.gated = true;
  a.cols = 8;
  EXPECT_NE(nullptr, activation_fwd_cuda(a, nullptr, 1, nullptr));
}

// The form that device code takes for gelu_tanh.
TEST(GeluTanhBySigmoid, MatchesDefinition) {
  for (double x = -12; x < 12; x += 1e-3) {
    const auto exact = gelu_tanh_by_sigmoid(x);
    EXPECT_NEAR(naive(Activation::gelu_tanh, x), exact.value, 1e-14) << x;
    EXPECT_NEAR(naive_grad(Activation::gelu_tanh, x), exact.grad, 1e-14) << x;
    const auto single = gelu_tanh_by_sigmoid(float(x));
    const double allowed = 1e-6 * (1 + std::abs(x));
    EXPECT_NEAR(naive(Activation::gelu_tanh, double(float(x))), single.value, allowed) << x;
    EXPECT_NEAR(naive_grad(Activation::gelu_tanh, double(float(x))), single.grad, allowed) << x;
  }
  EXPECT_TRUE(std::isnan(gelu_tanh_by_sigmoid(NAN).value));
}

}  // namespace
}  // namespace ckptfused
