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
// a table in numerics.cpp. A replay computes under those of its forward.
using Settings = std::vector<int64_t>;
Settings current_settings();

// While one lives, settings hold. What differs is set and in the end set back. Those of the process
// are other threads' for as long, too: a guard that wants others waits until no thread has a guard,
// and guards that want the same go side by side.
class SettingsGuard {
 public:
  // Those that hold already, which nobody sets otherwise meanwhile. Never waits.
  SettingsGuard();
  explicit SettingsGuard(const Settings& wanted);
  ~SettingsGuard();
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

  const Settings& settings() const { return settings_; }

 private:
  struct Level;
  struct Process;
  void hold(Process& process, const Settings& here);

  Settings settings_;
  Level* level_;
  std::unique_ptr<ThreadsGuard> threads_;
  std::unique_ptr<SubnormalModeGuard> subnormals_;
};

}  // namespace ckptfused
