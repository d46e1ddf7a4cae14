#pragma once

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cross_entropy.h"
#include "tests/util.h"

namespace ckptfused {

// Rows of products of a head, and what their loss is by its definition, in double.
template <typename T>
struct CrossEntropyProblem {
  struct Options {
    double scale = 1, softcap = 0, smoothing = 0, z_loss = 0;
    bool weighted = false;
  };
  using A = acc_t<T>;

  Options options;
  int64_t rows, classes, stride;
  Values<T> products;
  std::vector<int64_t> targets;
  std::vector<A> weights;  // classes + 1, the last one their sum

  CrossEntropyProblem(int64_t rows, int64_t classes, Options options, int64_t pad = 0)
      : options(options), rows(rows), classes(classes), stride(classes + pad) {
    products = random_values<T>(rows * stride, 1);
    double sum = 0;
    for (int64_t c = 0; c < classes; ++c) {
      weights.push_back(options.weighted ? A(0.5) + A(c % 3) / 2 : A(1));
      sum += double(weights.back());
    }
    weights.push_back(A(sum));
    for (int64_t r = 0; r < rows; ++r) {
      targets.push_back(r % 4 == 3 ? -100 : (r * 7919) % classes);
    }
  }

  template <typename Args>
  Args args(T* logits, int64_t col0, int64_t cols) const {
    Args a{};
    a.dtype = dtype_of<T>();
    a.classes = classes;
    a.col0 = col0;
    a.cols = cols;
    a.stride = stride;
    a.target = targets.data();
    a.ignore_index = -100;
    a.class_weight = options.weighted ? weights.data() : nullptr;
    a.scale = options.scale;
    a.softcap = options.softcap;
    a.smoothing = options.smoothing;
    a.smooth = options.smoothing / double(classes);
    a.z_loss = options.z_loss;
    a.logits = logits + col0;
    return a;
  }

  double logit(int64_t row, int64_t c) const {
    const double x = products.exact[row * stride + c] * options.scale;
    return options.softcap != 0 ? options.softcap * std::tanh(x / options.softcap) : x;
  }
  double lse(int64_t row) const {
    double max = -INFINITY, sum = 0;
    for (int64_t c = 0; c < classes; ++c) max = std::max(max, logit(row, c));
    for (int64_t c = 0; c < classes; ++c) sum += std::exp(logit(row, c) - max);
    return max + std::log(sum);
  }
  int64_t predicted(int64_t row) const {
    int64_t best = 0;
    for (int64_t c = 1; c < classes; ++c) {
      if (logit(row, c) > logit(row, best)) best = c;
    }
    return best;
  }
  double loss(int64_t row) const {
    const int64_t target = targets[row];
    if (target == -100) return 0;
    const double l = lse(row), s = options.smoothing;
    double smooth = 0;
    for (int64_t c = 0; c < classes; ++c) smooth += double(weights[c]) * (l - logit(row, c));
    return double(weights[target]) * (1 - s) * (l - logit(row, target)) +
           s / double(classes) * smooth + options.z_loss * l * l;
  }
  // `l`: the row's lse.
  double grad(int64_t row, int64_t c, double l) const {
    const int64_t target = targets[row];
    if (target == -100) return 0;
    const double s = options.smoothing / double(classes);
    const double own = double(weights[target]) * (1 - options.smoothing);
    const double p = std::exp(logit(row, c) - l);
    const double t = options.softcap != 0 ? logit(row, c) / options.softcap : 0;
    return (p * (own + s * double(weights[classes]) + 2 * options.z_loss * l) -
            s * double(weights[c]) - (c == target ? own : 0)) *
           options.scale * (1 - t * t);
  }

  // Checks what a forward with gradients found, and what a backward in two slices of classes finds.
  // `fwd` and `bwd` run a call over all rows.
  template <typename Fwd, typename Bwd>
  void check(Fwd fwd, Bwd bwd) const {
    std::vector<T> logits = products.stored;
    std::vector<A> losses(rows), lses(rows);
    std::vector<int64_t> guesses(rows);
    auto a = args<CrossEntropyFwd>(logits.data(), 0, classes);
    a.loss = losses.data();
    a.lse = lses.data();
    a.predicted = guesses.data();
    a.grad = true;
    fwd(a);
    const double ulps = std::is_same_v<A, float> ? 1e-6 : 1e-13;
    for (int64_t r = 0; r < rows; ++r) {
      EXPECT_NEAR(double(lses[r]), lse(r), ulps * (2 + std::abs(lse(r)))) << r;
      EXPECT_NEAR(double(losses[r]), loss(r), 4 * ulps * (2 + std::abs(loss(r)))) << r;
      EXPECT_EQ(guesses[r], predicted(r)) << r;
    }
    std::vector<T> sliced = products.stored;
    const int64_t first = classes / 2;
    for (const auto& [col0, cols] :
         {std::pair(int64_t(0), first), std::pair(first, classes - first)}) {
      auto b = args<CrossEntropyBwd>(sliced.data(), col0, cols);
      b.lse = lses.data();
      bwd(b);
    }
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<double> wanted;
      const double l = lse(r);
      for (int64_t c = 0; c < classes; ++c) wanted.push_back(grad(r, c, l));
      // exp of a difference whose terms are rounded: an ulp of lse, of a number about 1.
      expect_close(logits.data() + r * stride, wanted, 1 + std::abs(l), 8, "gradient");
      EXPECT_EQ(0, std::memcmp(&logits[r * stride], &sliced[r * stride], classes * sizeof(T))) << r;
      for (int64_t c = classes; c < stride; ++c) {
        EXPECT_EQ(
            0, std::memcmp(&logits[r * stride + c], &products.stored[r * stride + c], sizeof(T)));
      }
    }
  }
};

template <typename T>
std::vector<CrossEntropyProblem<T>> cross_entropy_problems() {
  std::vector<CrossEntropyProblem<T>> problems;
  const std::vector<int64_t> sizes =
      kThreadSanitizer ? std::vector<int64_t>{33} : std::vector<int64_t>{1, 7, 33, 1000};
  for (const int64_t classes : sizes) {
    problems.emplace_back(5, classes, typename CrossEntropyProblem<T>::Options{});
    problems.emplace_back(5, classes, typename CrossEntropyProblem<T>::Options{0.5, 3, 0.1, 0.01},
                          3);
    problems.emplace_back(5, classes, typename CrossEntropyProblem<T>::Options{-1, 0, 0.2, 0, true},
                          8);
  }
  return problems;
}

}  // namespace ckptfused
