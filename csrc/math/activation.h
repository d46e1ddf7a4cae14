#pragma once

#include "math/elementary.h"

namespace ckptfused {

// The function of the pre-activation; a gated unit is act(g) * u with one of them.
enum class Activation : int { relu, gelu, gelu_tanh, silu, relu2 };

// act(x) and its derivative. At 0, relu and relu2 have derivative 0, as in PyTorch; NaN passes.
template <typename A>
struct ActivationValue {
  A value, grad;
};

template <Activation kAct, typename A>
CKPT_HD ActivationValue<A> activation_with_grad(A x) {
  if constexpr (kAct == Activation::relu) {
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
  } else {
    static_assert(kAct == Activation::gelu_tanh);
    const A k0 = A(0.79788456080286535588), k1 = A(0.044715);  // sqrt(2 / pi)
    const A square = x * x;
    const A t = tanh_acc(k0 * x * (A(1) + k1 * square));
    const A slope = k0 * (A(1) + A(3) * k1 * square);
    return {A(0.5) * x * (A(1) + t), A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * slope};
  }
}

// The compiler drops the derivative's arithmetic.
template <Activation kAct, typename A>
CKPT_HD A activation_value(A x) {
  return activation_with_grad<kAct>(x).value;
}

}  // namespace ckptfused
