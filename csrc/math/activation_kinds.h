// Written by `make spec-header` from ckptfused/spec/. Change that, not this.
// clang-format off
#pragma once

namespace ckptfused {

// The function of the pre-activation; a gated unit is act(g) * u with one of them.
enum class Activation : int { relu, gelu, gelu_tanh, silu, relu2, quick_gelu, sigmoid, xielu };
// Calls X(kind, whether a gated unit has it) for each.
#define CKPT_FOR_ACTIVATIONS(X) X(relu, true) X(gelu, true) X(gelu_tanh, true) X(silu, true) X(relu2, false) X(quick_gelu, true) X(sigmoid, true) X(xielu, false)

struct NamedActivation {
  const char* name;
  Activation act;
  bool gated;
};
inline constexpr NamedActivation kActivations[] = {
    {"relu", Activation::relu, false},
    {"gelu", Activation::gelu, false},
    {"gelu_tanh", Activation::gelu_tanh, false},
    {"silu", Activation::silu, false},
    {"relu2", Activation::relu2, false},
    {"quick_gelu", Activation::quick_gelu, false},
    {"sigmoid", Activation::sigmoid, false},
    {"xielu", Activation::xielu, false},
    {"swiglu", Activation::silu, true},
    {"geglu", Activation::gelu, true},
    {"geglu_tanh", Activation::gelu_tanh, true},
    {"reglu", Activation::relu, true},
    {"quick_geglu", Activation::quick_gelu, true},
    {"glu", Activation::sigmoid, true},
};

}  // namespace ckptfused
