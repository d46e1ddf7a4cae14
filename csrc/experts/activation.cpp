// What experts make between their two products, and the text that says it.
#include "ops/torch.h"

#include <sstream>

#include "block/ops.h"
#include "block/spec.h"
#include "experts/experts.h"
#include "math/activation_kinds.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kOp = "experts";
constexpr const char* kClamped = "clamped";

const NamedActivation* named(const std::string& act) {
  for (const NamedActivation& known : kActivations) {
    if (known.name == act) return &known;
  }
  return nullptr;
}

// clamped: (min(max(u, -limit), limit) + offset) * g' * sigmoid(alpha * g'), g' = min(g, limit).
struct Clamped {
  Tensor gate, up, sigmoid;  // the last two factors' parts, in the accumulation type
  Clamped(const ExpertsSpec& spec, const Tensor& g, const Tensor& u)
      : gate(g.clamp_max(spec.limit)),
        up(u.clamp(-spec.limit, spec.limit).add_(spec.offset)),
        sigmoid(gate.mul(spec.alpha).sigmoid_()) {}
  Tensor h() const { return up * (gate * sigmoid); }
};

}  // namespace

bool ExpertsSpec::gated() const {
  return act == kClamped || named(act)->gated;
}

ExpertsSpec parse_experts_spec(const std::string& text) {
  ExpertsSpec spec;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (key == "act") {
      spec.act = value;
    } else if (key == "interleaved") {
      spec.interleaved = value == "1";
    } else if (key == "transposed") {
      spec.transposed = value == "1";
    } else if (key == "limit") {
      spec.limit = to_double(value);
    } else if (key == "alpha") {
      spec.alpha = to_double(value);
    } else if (key == "offset") {
      spec.offset = to_double(value);
    } else if (key == "up_scale") {
      spec.up_scale = to_double(value);
    } else if (key == "down_scale") {
      spec.down_scale = to_double(value);
    } else if (key == "up_p") {
      spec.up_p = to_double(value);
    } else if (key == "down_p") {
      spec.down_p = to_double(value);
    } else if (key == "quant") {
      spec.quant = parse_quantized(value);
    } else if (key == "compute") {
      spec.compute = value == "bfloat16"  ? at::kBFloat16
                     : value == "float16" ? at::kHalf
                                          : at::kFloat;
    } else {
      TORCH_CHECK(false, kOp, ": spec: expected words of ExpertsSpec.to_string(), got ", word);
    }
  }
  TORCH_CHECK(spec.act == kClamped || named(spec.act) != nullptr, kOp,
              ": act: expected an activation of ckptfused or ", kClamped, ", got ", spec.act);
  return spec;
}

Experts::Hidden Experts::split(const Tensor& both) const {
  if (!spec_.gated()) return {both, both, both};
  if (!spec_.interleaved) return {both, both.narrow(1, 0, I_), both.narrow(1, I_, I_)};
  return {both, both.slice(1, 0, std::nullopt, 2).contiguous(),
          both.slice(1, 1, std::nullopt, 2).contiguous()};
}

Tensor Experts::activated(const Hidden& hidden) const {
  if (spec_.act == kClamped) {
    return Clamped(spec_, hidden.gate.to(A_), hidden.up.to(A_)).h().to(P_);
  }
  const Tensor h = empty({hidden.up.size(0), I_}, P_);
  call::activation_fwd(hidden.gate, hidden.up, {}, h, spec_.act, 0.0, 0, I_, 0, 0, {});
  return h;
}

Tensor Experts::activation_gradient(const Hidden& hidden, const Tensor& dh) const {
  const Tensor both = at::empty_like(hidden.both);
  Tensor dgate, dup;
  if (spec_.act == kClamped) {
    const Tensor gate = hidden.gate.to(A_), up = hidden.up.to(A_), grad = dh.to(A_);
    // Of NaN, too, as clamp's own derivative is.
    const Tensor gate_beyond = gate.le(spec_.limit).logical_not_();
    const Tensor up_beyond = up.abs().le(spec_.limit).logical_not_();
    const Clamped c(spec_, gate, up);
    // The derivative of g * sigmoid(alpha * g) is SiLU's at alpha * g.
    dgate = c.gate * spec_.alpha;
    dgate = at::silu_backward(grad * c.up, dgate).masked_fill_(gate_beyond, 0);
    dup = (grad * c.gate * c.sigmoid).masked_fill_(up_beyond, 0);
  } else {
    const bool parts = spec_.gated() && !spec_.interleaved;
    dup = parts ? both.narrow(1, I_, I_) : spec_.gated() ? at::empty_like(hidden.up) : both;
    if (spec_.gated()) dgate = parts ? both.narrow(1, 0, I_) : at::empty_like(hidden.gate);
    call::activation_bwd(hidden.gate, hidden.up, dh, {}, {}, dgate, dup, spec_.act, 0.0, 0, I_, 0,
                         0, {});
    if (!spec_.interleaved || !spec_.gated()) return both;
  }
  (spec_.interleaved ? both.slice(1, 0, std::nullopt, 2) : both.narrow(1, 0, I_)).copy_(dgate);
  (spec_.interleaved ? both.slice(1, 1, std::nullopt, 2) : both.narrow(1, I_, I_)).copy_(dup);
  return both;
}

}  // namespace ckptfused
