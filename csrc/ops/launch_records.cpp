#include "ops/torch.h"

#include "ops/launch_records.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

namespace ckptfused {
namespace {

using at::Tensor;

// Of a few kilobytes each. Lengths that change with every step fill the table; then it begins anew.
constexpr size_t kMost = 512;

struct Records {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const LaunchRecord>> by_call;
  std::atomic<bool> used{[] {
    const char* value = std::getenv("CKPTFUSED_LAUNCH_RECORDS");
    return value != nullptr && std::string_view(value) == "1";
  }()};
  std::atomic<int64_t> hits{0};
};
Records& records() {
  static Records& all = *new Records;  // a thread may still launch while the process ends
  return all;
}

thread_local const std::string* wanted = nullptr;  // the key of the call that is in Python

std::shared_ptr<const LaunchRecord> find(const std::string& key) {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_call.find(key);
  return found == all.by_call.end() ? nullptr : found->second;
}

bool hooked(const LaunchRecord& record) {
  // Python changes such a length while it holds its lock, which is not held here.
  for (const int64_t* length : record.hooks) {
    if (__atomic_load_n(length, __ATOMIC_RELAXED) != 0) return true;
  }
  return false;
}

Tensor make(const LaunchRecord::Made& made, at::Device device) {
  Tensor t = at::empty_strided(made.sizes, made.strides,
                               at::TensorOptions().dtype(made.dtype).device(device));
  if (made.fill) t.fill_(*made.fill);
  return t;
}

}  // namespace

void LaunchCall::add(const Tensor& t) {
  const void* data = t.const_data_ptr();
  inputs_.push_back(data);
  if (!device_) device_ = t.device();
  add(int64_t(t.scalar_type()));
  add(int64_t(t.device().type()));
  add(int64_t(t.device().index()));
  add(reinterpret_cast<uintptr_t>(data) % 16 == 0);
  add(t.dim());
  for (const int64_t size : t.sizes()) add(size);
  for (const int64_t stride : t.strides()) add(stride);
}

void LaunchCall::add(const OptionalTensor& t) {
  add(given(t));
  if (given(t)) {
    add(*t);
  } else {
    inputs_.push_back(nullptr);
  }
}

void LaunchCall::add(std::string_view text) {
  add(text.size());
  key_.append(text);
}

std::optional<std::vector<Tensor>> LaunchCall::repeat(void* stream) const {
  const auto record = find(key_);
  if (record == nullptr || hooked(*record)) return std::nullopt;
  std::vector<Tensor> made;
  std::vector<const void*> data = inputs_;
  for (const LaunchRecord::Made& one : record->made) {
    made.push_back(make(one, *device_));
    data.push_back(made.back().mutable_data_ptr());
  }
  for (const LaunchRecord::Launch& launch : record->launches) {
    std::vector<uint64_t> values = launch.values;
    for (const auto& [parameter, tensor] : launch.tensors) {
      values[parameter] = reinterpret_cast<uintptr_t>(data[tensor]);
    }
    std::vector<void*> params;
    for (uint64_t& value : values) params.push_back(&value);
    const int error = record->start(launch.function, launch.grid, 1, 1, launch.threads, 1, 1,
                                    launch.shared, stream, params.data(), nullptr);
    TORCH_CHECK(error == 0, "attention: cuLaunchKernel returned error ", error,
                " of the CUDA driver, which may be of an earlier, asynchronous launch");
  }
  ++records().hits;
  made.resize(record->results);
  return made;
}

LaunchesWanted::LaunchesWanted(const LaunchCall& call) : outer_(wanted) {
  wanted = &call.key();
}

LaunchesWanted::~LaunchesWanted() {
  wanted = outer_;
}

bool launches_wanted() {
  return wanted != nullptr;
}

void keep_launches(LaunchRecord record) {
  TORCH_CHECK(launches_wanted(), "keep_launches: expected a call that wants its record, got none");
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  if (all.by_call.size() >= kMost) all.by_call.clear();
  all.by_call[*wanted] = std::make_shared<const LaunchRecord>(std::move(record));
}

void use_launch_records(bool use) {
  Records& all = records();
  const std::lock_guard lock(all.mutex);
  all.used = use;
  all.by_call.clear();
}

bool launch_records_used() {
  return records().used;
}

int64_t launch_record_hits() {
  return records().hits;
}

}  // namespace ckptfused
