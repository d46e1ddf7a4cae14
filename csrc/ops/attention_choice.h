#pragma once

#include "ops/torch.h"

#include <iterator>
#include <string>

// Attention calls as far as they decide who makes them, on any device.

namespace ckptfused {

// What PyTorch's kernels do not do, as bits; unequal lengths of queries and keys are one more.
enum AttentionSpecial : unsigned {
  kHasMasks = 1,
  kHasPadding = 2,
  kHasPacked = 4,
  kHasWindow = 8,
  kHasSoftcap = 16,
  kHasDropout = 32,
  kHasScale = 64,
};
inline constexpr const char* kAttentionSpecial[] = {
    "masks", "padding", "packed sequences", "window", "soft cap", "dropout", "scale of 0 or less"};

// What the choice depends on, beside PyTorch's settings.
struct AttentionShape {
  unsigned special;
  at::ScalarType dtype;
  int64_t batch, heads, queries, keys, head_dim;

  bool plain() const { return special == 0 && queries == keys; }
  // What of it PyTorch's kernels do not do, for a person.
  std::string missing() const {
    std::string list;
    const auto add = [&](const char* name) {
      list += (list.empty() ? "no " : ", no ") + std::string(name);
    };
    for (size_t i = 0; i < std::size(kAttentionSpecial); ++i) {
      if ((special >> i) & 1) add(kAttentionSpecial[i]);
    }
    if (queries != keys) add("unequal lengths");
    return list;
  }
};

// Whether PyTorch's flash kernel makes attention on the CPU; our tiles do otherwise. reason: for a
// person; null where nobody asks.
bool attention_is_flash(const AttentionShape& shape, std::string* reason = nullptr);

}  // namespace ckptfused
