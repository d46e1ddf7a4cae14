#pragma once

#include "ops/torch.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/checks.h"

// Launches of Triton's kernels repeated without Python.
//
// The first call of a kind goes through Python: Triton compiles and launches, and ckptfused/triton
// hands over what a launch consists of (records.py). The kind is everything that Triton and our
// launchers can see of a call, bit for bit: the op, each tensor's device, type, sizes, strides and
// whether it is aligned, every number and text. Its next calls start the same binaries with the
// same arguments from here. Only with CKPTFUSED_LAUNCH_RECORDS=1: what they bring is yet to be
// timed.

namespace ckptfused {

// cuLaunchKernel, or what stands for it in a test. It is handed over as an address, so that nothing
// here needs CUDA.
using LaunchKernel = int (*)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned threads_x, unsigned threads_y, unsigned threads_z,
                             unsigned shared, void* stream, void** params, void** extra);

struct LaunchRecord {
  struct Made {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    std::optional<double> fill;
  };
  struct Launch {
    void* function;
    unsigned grid, threads, shared;
    std::vector<uint64_t>
        values;  // of each parameter, of which the driver reads as many bytes as it has
    std::vector<std::pair<size_t, size_t>>
        tensors;  // (parameter, tensor): the inputs, then those made
  };
  LaunchKernel start;
  // Lengths of Python's lists of launch hooks, which live on. While there are hooks they have to be
  // called, so Python is.
  std::vector<const int64_t*> hooks;
  std::vector<Made> made;  // results first
  size_t results;
  std::vector<Launch> launches;
};

// A call's kind and its tensors.
class LaunchCall {
 public:
  explicit LaunchCall(std::string_view op) { add(op); }
  void add(const at::Tensor& t);
  void add(const OptionalTensor& t);
  void add(std::string_view text);
  template <typename Number>
  std::enable_if_t<std::is_arithmetic_v<Number>> add(Number number) {
    key_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  const std::string& key() const { return key_; }
  // The results; nothing where there is no record that serves.
  std::optional<std::vector<at::Tensor>> repeat(void* stream) const;

 private:
  std::string key_;
  std::vector<const void*> inputs_;
  std::optional<at::Device> device_;
};

// While it lives, what this thread hands over is the record of this call.
class LaunchesWanted {
 public:
  explicit LaunchesWanted(const LaunchCall& call);
  ~LaunchesWanted();
  LaunchesWanted(const LaunchesWanted&) = delete;
  LaunchesWanted& operator=(const LaunchesWanted&) = delete;

 private:
  const std::string* outer_;
};
bool launches_wanted();
void keep_launches(LaunchRecord record);

// Whether records are made and used, from now on; those that there are go. How often one was used.
void use_launch_records(bool use);
bool launch_records_used();
int64_t launch_record_hits();

template <typename Result, size_t... i>
Result as_tuple(std::vector<at::Tensor>& results, std::index_sequence<i...>) {
  TORCH_INTERNAL_ASSERT(results.size() == sizeof...(i));
  return Result{std::move(results[i])...};
}

// op.call(args...), from its record where there is one. The stream belongs to the current device.
template <typename Op, typename... Args>
auto call_recorded(const Op& op, void* stream, const Args&... args) -> decltype(op.call(args...)) {
  using Result = decltype(op.call(args...));
  if (!launch_records_used()) return op.call(args...);
  LaunchCall call(op.operator_name().name);
  (call.add(args), ...);
  if (auto results = call.repeat(stream)) {
    return as_tuple<Result>(*results, std::make_index_sequence<std::tuple_size_v<Result>>());
  }
  const LaunchesWanted wanted(call);
  return op.call(args...);
}

}  // namespace ckptfused
