#include "block/spec.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <locale>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include <c10/util/Exception.h>

#include "math/activation.h"

namespace ckptfused {

double to_double(const std::string& value) {
  std::istringstream stream(value);
  stream.imbue(std::locale::classic());
  double parsed = 0.0;
  TORCH_CHECK(stream >> parsed && stream.eof(), "ckptfused: spec expects a number, got '", value,
              "'");
  return parsed;
}

namespace {

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

void read(const std::string& value, double& member) {
  member = to_double(value);
}
void read(const std::string& value, int64_t& member) {
  member = to_int(value);
}
void read(const std::string& value, bool& member) {
  member = to_bool(value);
}
void read(const std::string& value, std::string& member) {
  member = value;
}

void read(const std::string& value, KeepSpec& keep) {
  for (const std::string& part : split(value, '+')) {
    bool known = false;
    for_fields(keep, [&](const char* name, bool& kept) {
      if (part == name) kept = known = true;
    });
    TORCH_CHECK(known, "ckptfused: unknown keep name '", part, "'");
  }
}

void read(const std::string& value, Parallel& parallel) {
  parallel = value == "shared" ? Parallel::shared_norm
             : to_bool(value)  ? Parallel::two_norms
                               : Parallel::no;
}

void read(const std::string& value, c10::ScalarType& compute) {
  const auto* found = std::find_if(std::begin(kComputeTypes), std::end(kComputeTypes),
                                   [&](const ComputeType& type) { return value == type.name; });
  TORCH_CHECK(found != std::end(kComputeTypes), "ckptfused: unknown compute type '", value, "'");
  compute = found->type;
}

// target:rank:scale:p, joined by +
void read(const std::string& value, std::vector<AdapterSpec>& adapters) {
  for (const std::string& text : split(value, '+')) {
    const std::vector<std::string> parts = split(text, ':');
    TORCH_CHECK(parts.size() == 4, "ckptfused: spec expects target:rank:scale:p, got '", text, "'");
    adapters.push_back({parts[0], to_int(parts[1]), to_double(parts[2]), to_double(parts[3])});
    const AdapterSpec& made = adapters.back();
    TORCH_CHECK(made.rank > 0, "ckptfused: an adapter's rank must be positive, got ", made.rank);
    TORCH_CHECK(made.p >= 0.0 && made.p <= 1.0, "ckptfused: an adapter's p must be in [0, 1], got ",
                made.p);
  }
}

void read(const std::string& value, std::vector<QuantizedSpec>& weights) {
  weights = parse_quantized(value);
}

// Sets the field of that key; whether there is one.
template <typename Fields>
bool set(Fields& fields, const std::string& key, const std::string& value) {
  bool known = false;
  for_fields(fields, [&](const char* name, auto& member) {
    if (key != name) return;
    read(value, member);
    known = true;
  });
  return known;
}

bool set(BlockSpec& spec, const std::string& key, const std::string& value) {
  if (key == "halves") {
    for (const std::string& half : split(value, '+')) {
      TORCH_CHECK(half == "attn" || half == "ffn", "ckptfused: unknown half '", half, "'");
      (half == "attn" ? spec.has_attn : spec.has_ffn) = true;
    }
    return true;
  }
  if (key.rfind("attn.", 0) == 0) return set(spec.attn, key.substr(5), value);
  if (key.rfind("ffn.", 0) == 0) return set(spec.ffn, key.substr(4), value);
  return set<BlockFields>(spec, key, value);
}

void check_probability(double p, const char* name) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, "ckptfused: dropout probability ", name,
              " must be in [0, 1], got ", p);
}

template <size_t kCount>
void find_targets(HalfSpec& half, const Projection (&projections)[kCount]) {
  const auto find = [&](auto& beside) {
    const auto* found =
        std::find_if(std::begin(projections), std::end(projections),
                     [&](const Projection& known) { return beside.target == known.name; });
    TORCH_CHECK(found != std::end(projections), "ckptfused: unknown target '", beside.target, "'");
    beside.weight = found->weight;
  };
  std::for_each(half.lora.begin(), half.lora.end(), find);
  std::for_each(half.quant.begin(), half.quant.end(), find);
}

// Sets the fields of a spec by the words of a text.
template <typename Spec>
Spec read_words(const std::string& text) {
  Spec spec;
  for (const std::string& token : split(text, ' ')) {
    const size_t equals = token.find('=');
    TORCH_CHECK(equals != std::string::npos, "ckptfused: spec token '", token,
                "' is not key=value");
    const std::string key = token.substr(0, equals);
    TORCH_CHECK(set(spec, key, token.substr(equals + 1)), "ckptfused: unknown spec key '", key,
                "'");
  }
  return spec;
}

BlockSpec parse(const std::string& text) {
  BlockSpec spec = read_words<BlockSpec>(text);
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
    TORCH_CHECK(attn.qk_place == "head" || attn.qk_place == "turned" ||
                    (attn.qk_place == "row" && !attn.interleaved),
                "ckptfused: unknown qk_place '", attn.qk_place, "', or row where interleaved");
    if (attn.scale == 0.0) attn.scale = 1.0 / std::sqrt(double(attn.head_dim));
    if (attn.rotary_dim == 0) attn.rotary_dim = attn.head_dim;
    find_targets(attn, kAttentionProjections);
  }
  if (spec.has_ffn) {
    TORCH_CHECK(spec.ffn.hidden > 0, "ckptfused: hidden must be positive, got ", spec.ffn.hidden);
    const NamedActivation* act = find_activation(spec.ffn.act);
    TORCH_CHECK(act != nullptr, "ckptfused: unknown activation '", spec.ffn.act, "'");
    spec.ffn.is_gated = act->gated;
    find_targets(spec.ffn, kFFNProjections);
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

// The spec of a text, made once.
template <typename Spec>
std::shared_ptr<const Spec> remembered(const std::string& text, Spec (*make)(const std::string&)) {
  // A model has a handful of specs; a schedule of dropout probabilities has one a step.
  constexpr size_t kMostSpecs = 1024;
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const Spec>> cache;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cache.find(text);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMostSpecs) cache.clear();
  return cache[text] = std::make_shared<const Spec>(make(text));
}

}  // namespace

std::vector<QuantizedSpec> parse_quantized(const std::string& value) {
  std::vector<QuantizedSpec> weights;
  for (const std::string& text : split(value, '+')) {
    const size_t colon = text.find(':');
    TORCH_CHECK(colon != std::string::npos, "ckptfused: spec expects target:form, got '", text,
                "'");
    weights.push_back({text.substr(0, colon), text.substr(colon + 1)});
  }
  return weights;
}

std::shared_ptr<const BlockSpec> parse_spec(const std::string& text) {
  return remembered<BlockSpec>(text, parse);
}

std::shared_ptr<const LossSpec> parse_loss_spec(const std::string& text) {
  return remembered<LossSpec>(text, read_words<LossSpec>);
}

}  // namespace ckptfused
