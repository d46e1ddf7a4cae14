#pragma once

#include <algorithm>
#include <cmath>

#include "math/activation.h"

namespace ckptfused {

// The coefficients with which xIELU is tested: at these its values at 0, 60 and -60 are exact.
template <typename A>
inline constexpr XieluCoefficients<A> kXielu = {A(0.75), A(1), A(0.5), A(0)};
template <typename T>
const void* coefficients_for(Activation act) {
  return act == Activation::xielu ? &kXielu<acc_t<T>> : nullptr;
}

// Activations and their derivatives by definition, in double precision.
inline double naive(Activation act, double x) {
  switch (act) {
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::relu2:
      return x > 0 ? x * x : 0;
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::quick_gelu:
      return x / (1 + std::exp(-1.702 * x));
    case Activation::sigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::xielu:
      return x > 0 ? 0.75 * x * x + 0.5 * x : std::expm1(std::min(x, 0.0)) - x + 0.5 * x;
    default:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  }
}

// What an activation and its derivative are at 0, 60 and -60, where kernels have them exactly.
struct AtEdges {
  double zero, slope_at_zero, sixty, slope_at_sixty, below, slope_below;
};
inline AtEdges at_edges(Activation act) {
  switch (act) {
    case Activation::relu:
      return {0, 0, 60, 1, 0, 0};
    case Activation::relu2:
      return {0, 0, 3600, 120, 0, 0};
    case Activation::sigmoid:
      return {0.5, 0.25, 1, 0, 0, 0};
    case Activation::xielu:  // at 0, min(x, 0) has half a slope
      return {0, 0, 2730, 90.5, 29, -0.5};
    default:
      return {0, 0.5, 60, 1, 0, 0};
  }
}

inline double naive_grad(Activation act, double x) {
  const double sigmoid = 1 / (1 + std::exp(-x));
  const double quick = 1 / (1 + std::exp(-1.702 * x));
  const double tanh = std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
  switch (act) {
    case Activation::relu:
      return x > 0 ? 1 : 0;
    case Activation::relu2:
      return x > 0 ? 2 * x : 0;
    case Activation::silu:
      return sigmoid + x * sigmoid * (1 - sigmoid);
    case Activation::gelu:
      return 0.5 * std::erfc(-x / std::sqrt(2.0)) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    case Activation::quick_gelu:
      return quick + 1.702 * x * quick * (1 - quick);
    case Activation::sigmoid:
      return sigmoid * (1 - sigmoid);
    case Activation::xielu:
      return x > 0 ? 1.5 * x + 0.5 : std::exp(x) - 0.5;
    default:
      return 0.5 * (1 + tanh) +
             0.5 * x * (1 - tanh * tanh) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
  }
}

}  // namespace ckptfused
