#pragma once

#include <cstdint>
#include <string>

#include <c10/core/ScalarType.h>

namespace ckptfused {

// What the fields of a spec are made of (spec_fields.h).

struct NormSpec {
  std::string kind;  // one of POST_NORMS
  double eps;
  bool on() const { return kind != "none"; }
};

// A projection by its name, and the slot of its weight among those of its half.
struct Projection {
  const char* name;
  int weight;
};

// A low-rank adapter beside a projection: y += scale * b(a(drop(x))).
struct AdapterSpec {
  std::string target;
  int64_t rank;
  double scale, p;
  int weight = 0;  // the target's slot in its half
};

// A weight that is stored in few bits: see ckptfused/spec/quantized.py.
struct QuantizedSpec {
  std::string target, form;
  int weight = 0;  // the target's slot in its half
};

enum class Parallel { no, two_norms, shared_norm };

struct ComputeType {
  const char* name;
  c10::ScalarType type;
};

}  // namespace ckptfused
