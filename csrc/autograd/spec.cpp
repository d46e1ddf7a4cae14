#include "autograd/spec.h"

#include <algorithm>
#include <functional>
#include <locale>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include <c10/util/Exception.h>

namespace ckptfused {
namespace {

using Setter = std::function<void(BlockSpec&, const std::string&)>;

// Not std::stod, which reads "0.1" as 0 in a program whose locale has decimal commas.
double to_double(const std::string& value) {
  std::istringstream stream(value);
  stream.imbue(std::locale::classic());
  double parsed = 0.0;
  TORCH_CHECK(stream >> parsed && stream.eof(), "ckptfused: spec expects a number, got '", value,
              "'");
  return parsed;
}
int64_t to_int(const std::string& value) {
  size_t used = 0;
  const int64_t parsed = std::stoll(value, &used);
  TORCH_CHECK(used == value.size(), "ckptfused: spec expects an integer, got '", value, "'");
  return parsed;
}
bool to_bool(const std::string& value) {
  TORCH_CHECK(value == "0" || value == "1", "ckptfused: spec expects 0 or 1, got '", value, "'");
  return value == "1";
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

void set_halves(BlockSpec& spec, const std::string& value) {
  for (const std::string& half : split(value, '+')) {
    TORCH_CHECK(half == "attn" || half == "ffn", "ckptfused: unknown half '", half, "'");
    (half == "attn" ? spec.has_attn : spec.has_ffn) = true;
  }
}

void set_keep(BlockSpec& spec, const std::string& value) {
  static const std::unordered_map<std::string, bool KeepSpec::*> names = {
      {"attn", &KeepSpec::attn}, {"mid", &KeepSpec::mid}, {"proj", &KeepSpec::proj},
      {"qkv", &KeepSpec::qkv},   {"gu", &KeepSpec::gu},   {"out", &KeepSpec::out}};
  for (const std::string& name : split(value, '+')) {
    const auto found = names.find(name);
    TORCH_CHECK(found != names.end(), "ckptfused: unknown keep name '", name, "'");
    spec.keep.*(found->second) = true;
  }
}

void set_parallel(BlockSpec& spec, const std::string& value) {
  spec.parallel = value == "shared" ? Parallel::shared_norm
                  : to_bool(value)  ? Parallel::two_norms
                                    : Parallel::no;
}

void set_compute(BlockSpec& spec, const std::string& value) {
  static const std::unordered_map<std::string, c10::ScalarType> types = {
      {"float64", c10::kDouble},
      {"float32", c10::kFloat},
      {"bfloat16", c10::kBFloat16},
      {"float16", c10::kHalf}};
  const auto found = types.find(value);
  TORCH_CHECK(found != types.end(), "ckptfused: unknown compute type '", value, "'");
  spec.compute = found->second;
}

// target:rank:scale:p, joined by +
std::vector<AdapterSpec> to_adapters(const std::string& value,
                                     const std::vector<std::string>& targets) {
  std::vector<AdapterSpec> adapters;
  for (const std::string& text : split(value, '+')) {
    const std::vector<std::string> parts = split(text, ':');
    TORCH_CHECK(parts.size() == 4, "ckptfused: spec expects target:rank:scale:p, got '", text, "'");
    TORCH_CHECK(std::find(targets.begin(), targets.end(), parts[0]) != targets.end(),
                "ckptfused: unknown target '", parts[0], "' of an adapter");
    adapters.push_back({parts[0][0], to_int(parts[1]), to_double(parts[2]), to_double(parts[3])});
    const AdapterSpec& made = adapters.back();
    TORCH_CHECK(made.rank > 0, "ckptfused: an adapter's rank must be positive, got ", made.rank);
    TORCH_CHECK(made.p >= 0.0 && made.p <= 1.0, "ckptfused: an adapter's p must be in [0, 1], got ",
                made.p);
  }
  return adapters;
}

template <typename Half>
void add_half(std::unordered_map<std::string, Setter>& keys, const std::string& prefix,
              Half BlockSpec::* half) {
  for (auto& [name, norm] : {std::pair<const char*, NormSpec HalfSpec::*>{"pre", &HalfSpec::pre},
                             {"post", &HalfSpec::post},
                             {"out", &HalfSpec::out}}) {
    const auto member = norm;
    keys[prefix + name] = [=](BlockSpec& s, const std::string& v) { ((s.*half).*member).kind = v; };
    keys[prefix + name + "_eps"] = [=](BlockSpec& s, const std::string& v) {
      ((s.*half).*member).eps = to_double(v);
    };
  }
  keys[prefix + "m"] = [=](BlockSpec& s, const std::string& v) { (s.*half).m = to_double(v); };
  keys[prefix + "p_res"] = [=](BlockSpec& s, const std::string& v) {
    (s.*half).p_res = to_double(v);
  };
  keys[prefix + "joint"] = [=](BlockSpec& s, const std::string& v) {
    (s.*half).joint = to_bool(v);
  };
  keys[prefix + "transposed"] = [=](BlockSpec& s, const std::string& v) {
    (s.*half).transposed = to_bool(v);
  };
}

std::unordered_map<std::string, Setter> make_keys() {
  std::unordered_map<std::string, Setter> keys;
  keys["halves"] = set_halves;
  keys["keep"] = set_keep;
  keys["parallel"] = set_parallel;
  keys["seq_first"] = [](BlockSpec& s, const std::string& v) { s.seq_first = to_bool(v); };
  keys["compute"] = set_compute;

  add_half(keys, "attn.", &BlockSpec::attn);
  const auto attn = [&keys](const char* key, auto set) {
    keys[std::string("attn.") + key] = [set](BlockSpec& s, const std::string& v) {
      set(s.attn, v);
    };
  };
  using A = AttentionSpec;
  attn("heads", [](A& a, const std::string& v) { a.heads = to_int(v); });
  attn("kv_heads", [](A& a, const std::string& v) { a.kv_heads = to_int(v); });
  attn("head_dim", [](A& a, const std::string& v) { a.head_dim = to_int(v); });
  attn("interleaved", [](A& a, const std::string& v) { a.interleaved = to_bool(v); });
  attn("scale", [](A& a, const std::string& v) { a.scale = to_double(v); });
  attn("causal", [](A& a, const std::string& v) { a.causal = to_bool(v); });
  attn("window", [](A& a, const std::string& v) { a.window = to_int(v); });
  attn("softcap", [](A& a, const std::string& v) { a.softcap = to_double(v); });
  attn("rope", [](A& a, const std::string& v) { a.rope = v; });
  attn("rotary_dim", [](A& a, const std::string& v) { a.rotary_dim = to_int(v); });
  attn("qk_norm", [](A& a, const std::string& v) { a.qk.kind = v; });
  attn("qk_eps", [](A& a, const std::string& v) { a.qk.eps = to_double(v); });
  attn("p_attn", [](A& a, const std::string& v) { a.p_attn = to_double(v); });
  attn("mask", [](A& a, const std::string& v) { a.mask = v; });
  attn("padding", [](A& a, const std::string& v) { a.padding = v; });
  attn("packed", [](A& a, const std::string& v) { a.packed = to_bool(v); });

  attn("lora", [](A& a, const std::string& v) { a.lora = to_adapters(v, {"q", "k", "v", "o"}); });

  add_half(keys, "ffn.", &BlockSpec::ffn);
  keys["ffn.lora"] = [](BlockSpec& s, const std::string& v) {
    s.ffn.lora = to_adapters(v, {"gate", "up", "down"});
  };
  keys["ffn.act"] = [](BlockSpec& s, const std::string& v) { s.ffn.act = v; };
  keys["ffn.hidden"] = [](BlockSpec& s, const std::string& v) { s.ffn.hidden = to_int(v); };
  keys["ffn.p_hidden"] = [](BlockSpec& s, const std::string& v) { s.ffn.p_hidden = to_double(v); };
  return keys;
}

void check_probability(double p, const char* name) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, "ckptfused: dropout probability ", name,
              " must be in [0, 1], got ", p);
}

BlockSpec parse(const std::string& text) {
  static const std::unordered_map<std::string, Setter> keys = make_keys();
  BlockSpec spec;
  for (const std::string& token : split(text, ' ')) {
    const size_t equals = token.find('=');
    TORCH_CHECK(equals != std::string::npos, "ckptfused: spec token '", token,
                "' is not key=value");
    const auto found = keys.find(token.substr(0, equals));
    TORCH_CHECK(found != keys.end(), "ckptfused: unknown spec key '", token.substr(0, equals), "'");
    found->second(spec, token.substr(equals + 1));
  }
  TORCH_CHECK(spec.has_attn || spec.has_ffn, "ckptfused: spec names no half: '", text, "'");
  AttentionSpec& attn = spec.attn;
  if (spec.has_attn) {
    TORCH_CHECK(attn.heads > 0 && attn.kv_heads > 0 && attn.head_dim > 0,
                "ckptfused: heads, kv_heads and head_dim must be positive, got ", attn.heads, ", ",
                attn.kv_heads, ", ", attn.head_dim);
    TORCH_CHECK(attn.heads % attn.kv_heads == 0, "ckptfused: heads (", attn.heads,
                ") must be a multiple of kv_heads (", attn.kv_heads, ")");
    TORCH_CHECK(!attn.interleaved || (attn.joint && attn.heads == attn.kv_heads),
                "ckptfused: interleaved needs one joint weight and heads == kv_heads");
    if (attn.scale == 0.0) attn.scale = 1.0 / std::sqrt(double(attn.head_dim));
    if (attn.rotary_dim == 0) attn.rotary_dim = attn.head_dim;
  }
  if (spec.has_ffn) {
    TORCH_CHECK(spec.ffn.hidden > 0, "ckptfused: hidden must be positive, got ", spec.ffn.hidden);
  }
  check_probability(attn.p_attn, "p_attn");
  check_probability(attn.p_res, "p_res");
  check_probability(spec.ffn.p_hidden, "p_hidden");
  check_probability(spec.ffn.p_res, "p_res");
  if (spec.parallel != Parallel::no) {
    TORCH_CHECK(spec.has_attn && spec.has_ffn && !attn.out.on() && !spec.ffn.out.on(),
                "ckptfused: a parallel block has two halves and no closing norm");
  }
  return spec;
}

}  // namespace

std::shared_ptr<const BlockSpec> parse_spec(const std::string& text) {
  // A model has a handful of specs; a schedule of dropout probabilities has one a step.
  constexpr size_t kMostSpecs = 1024;
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const BlockSpec>> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cache.find(text);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMostSpecs) cache.clear();
  return cache[text] = std::make_shared<const BlockSpec>(parse(text));
}

}  // namespace ckptfused
