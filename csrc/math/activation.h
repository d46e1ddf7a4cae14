#pragma once

#include <string_view>

#include "math/activation_kinds.h"
#include "math/elementary.h"

namespace ckptfused {

// The activation of that name, null if there is none.
inline const NamedActivation* find_activation(std::string_view name) {
  for (const NamedActivation& known : kActivations) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

// act(x) and its derivative. At 0, relu and relu2 have derivative 0, as in PyTorch; NaN passes.
template <typename A>
struct ActivationValue {
  A value, grad;
};

// gelu_tanh with (1 + tanh(y)) / 2 written as sigmoid(2 y): fewer instructions on device, and no
// cancellation where tanh is near -1. The sums are written as fma, which the compiler cannot
// contract differently in forward and backward.
template <typename A>
CKPT_HD ActivationValue<A> gelu_tanh_by_sigmoid(A x) {
  const A k0 = A(1.59576912160573071176), k1 = A(0.044715);  // 2 sqrt(2 / pi)
  const A square = x * x;
  const A s = sigmoid_acc(k0 * x * std::fma(k1, square, A(1)));
  const A slope = k0 * std::fma(A(3) * k1, square, A(1));
  return {x * s, std::fma(x * s * (A(1) - s), slope, s)};
}

// xIELU: (positive x + beta) x above 0, (expm1(min(x, eps)) - x) negative + beta x elsewhere.
template <typename A>
struct XieluCoefficients {
  A positive, negative, beta, eps;

  // How much of the slope of min(x, eps) is that of x: as of PyTorch's, half where they are equal.
  CKPT_HD A share_of_x(A x) const { return x < eps ? A(1) : x == eps ? A(0.5) : A(0); }
  // expm1(min(x, eps)) - x.
  CKPT_HD A below(A x) const { return expm1_acc(x > eps ? eps : x) - x; }
  // The sums are written as fma on device, for the reason given above.
  CKPT_HD ActivationValue<A> operator()(A x) const {
    const A low = expm1_acc(x > eps ? eps : x), share = share_of_x(x), by_beta = beta * x;
    const A inner = low - x, slope = share * (low + A(1)) - A(1);
#if CKPT_DEVICE
    return {x > A(0) ? std::fma(positive, x, beta) * x : std::fma(inner, negative, by_beta),
            x > A(0) ? std::fma(A(2) * positive, x, beta) : std::fma(slope, negative, beta)};
#else
    return {x > A(0) ? (positive * x + beta) * x : inner * negative + by_beta,
            x > A(0) ? A(2) * positive * x + beta : slope * negative + beta};
#endif
  }
};

// What the coefficients' gradients are of one element, for a gradient d of its value; that of eps
// is yet to be multiplied by slope_of_eps. All is computed before it is chosen from, or the host
// compiler would not vectorise loops over it.
template <typename A>
CKPT_HD XieluCoefficients<A> xielu_grads(const XieluCoefficients<A>& c, A x, A d) {
  const A square = d * x * x, below = d * c.below(x), of_eps = (A(1) - c.share_of_x(x)) * d;
  return {x > A(0) ? square : A(0), x > A(0) ? A(0) : below, d * x, x > A(0) ? A(0) : of_eps};
}
template <typename A>
CKPT_HD A slope_of_eps(const XieluCoefficients<A>& c) {
  return c.negative * exp_acc(c.eps);
}

// coefficients: xIELU's; other activations have none.
template <Activation kAct, typename A>
CKPT_HD ActivationValue<A> activation_with_grad(A x,
                                                const XieluCoefficients<A>& coefficients = {}) {
  if constexpr (kAct == Activation::xielu) {
    return coefficients(x);
  } else if constexpr (kAct == Activation::relu) {
    return {x < A(0) ? A(0) : x, x <= A(0) ? A(0) : A(1)};
  } else if constexpr (kAct == Activation::relu2) {
    const A r = x < A(0) ? A(0) : x;
    return {r * r, A(2) * r};
  } else if constexpr (kAct == Activation::silu) {
    const A s = sigmoid_acc(x);
    return {x * s, s * (A(1) + x * (A(1) - s))};
  } else if constexpr (kAct == Activation::gelu) {
    const A cdf = A(0.5) * (A(1) + erf_acc(x * A(0.70710678118654752440)));
    const A pdf = A(0.39894228040143267794) * exp_acc(A(-0.5) * x * x);
    return {x * cdf, cdf + x * pdf};
  } else if constexpr (kAct == Activation::sigmoid) {
    const A s = sigmoid_acc(x);
    return {s, s * (A(1) - s)};
  } else if constexpr (kAct == Activation::quick_gelu) {
    const A k = A(1.702);
    const A s = sigmoid_acc(k * x);
    const A value = x * s;  // taken with 1 - s before k, so that no product overflows
    return {value, s + k * (value * (A(1) - s))};
  } else {
    static_assert(kAct == Activation::gelu_tanh);
#if CKPT_DEVICE
    return gelu_tanh_by_sigmoid(x);
#else
    const A k0 = A(0.79788456080286535588), k1 = A(0.044715);  // sqrt(2 / pi)
    const A square = x * x;
    const A t = tanh_acc(k0 * x * (A(1) + k1 * square));
    const A slope = k0 * (A(1) + A(3) * k1 * square);
    return {A(0.5) * x * (A(1) + t), A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * slope};
#endif
  }
}

// The compiler drops the derivative's arithmetic.
template <Activation kAct, typename A>
CKPT_HD A activation_value(A x, const XieluCoefficients<A>& coefficients = {}) {
  return activation_with_grad<kAct>(x, coefficients).value;
}

}  // namespace ckptfused
