#pragma once

#include "ops/torch.h"

#include <string>
#include <vector>

#include "ops/ledger.h"

namespace ckptfused {

// A block call, as far as it decides what is allocated, multiplied and launched.
struct CountedCall {
  struct Param {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };

  std::string spec;
  std::vector<int64_t> sizes;  // of x
  at::ScalarType dtype;
  std::vector<std::optional<Param>> params;  // by slot
  std::vector<int64_t> cu_seqlens;           // of packed sequences
  // By slot, cos, sin and factors of q that are not as kernels read them; none at all: all are.
  std::vector<std::optional<Param>> tables;
};

// The events of a forward that returns kept values where save is set.
std::vector<Ledger::Event> count_forward(const CountedCall& call, const CountedDevice& device,
                                         bool save);
// Of a backward that makes the gradients of (x, params...) that needs asks for.
std::vector<Ledger::Event> count_backward(const CountedCall& call, const CountedDevice& device,
                                          const std::vector<bool>& needs);

}  // namespace ckptfused
