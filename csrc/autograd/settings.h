#pragma once

#include "ops/torch.h"

#include <memory>
#include <vector>

#include "kernels/cpu/subnormals.h"
#include "kernels/cpu/threads.h"

namespace ckptfused {

// What the bits of a result depend on beside the arguments: settings of the calling thread (how
// many threads work, whether subnormals are flushed) and of the process (the precision of float32
// products, reductions in half precision, which libraries and kernels are allowed), in the order of
// a table in settings.cpp. A replay computes under those of its forward.
using Settings = std::vector<int64_t>;
Settings current_settings();

// While one lives, those settings hold. What differs is set and in the end set back; settings of
// the process are other threads', too, for as long.
class SettingsGuard {
 public:
  explicit SettingsGuard(const Settings& wanted);
  ~SettingsGuard();
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  Settings previous_, wanted_;
  std::unique_ptr<ThreadsGuard> threads_;
  std::unique_ptr<SubnormalModeGuard> subnormals_;
  // What torch.get_float32_matmul_precision() says, where the precision of products is changed.
  std::optional<at::Float32MatmulPrecision> matmul_precision_;
};

}  // namespace ckptfused
