// Two CUDA devices for a PyTorch that is built without CUDA: memory is the host's, and what happens
// is noted as runtime.c does. Kernels and tensors are the test's.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

constexpr c10::DeviceIndex kDevices = 2;
std::string notes;
thread_local c10::DeviceIndex device = 0;
thread_local c10::StreamId streams[kDevices] = {};

void note(const char* call, c10::DeviceIndex index, c10::StreamId stream, size_t bytes = 0) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  notes += std::string(call) + ' ' + std::to_string(index) + ' ' + std::to_string(stream) + ' ' +
           std::to_string(bytes) + '\n';
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, device}; }
  void setDevice(c10::Device d) const override { device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { device = d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    device = d.index();
    return before;
  }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, streams[d.index()]);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const c10::Stream before = getStream(s.device());
    streams[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& s) const override {
    note("event", s.device_index(), s.id());
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    note("allocate", device, streams[device], bytes);
    void* data = std::malloc(bytes);
    return {data, data, &std::free, {c10::kCUDA, device}};
  }
  // As that of PyTorch's CUDA build: cudaMemcpy, of the device that is current, without a stream.
  void copy_data(void* to, const void* from, size_t bytes) const override {
    note("copy and wait", device, 0, bytes);
    std::memcpy(to, from, bytes);
  }
};

Guard guard;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, &guard);
Memory memory;
const bool registered = (c10::SetAllocator(c10::kCUDA, &memory), true);

}  // namespace

// The calling thread's stream on the second device; the first is current.
extern "C" void fake_stream(int stream) {
  streams[1] = stream;
}
extern "C" int fake_current() {
  return device;
}

extern "C" void fake_copy(void* to, const void* from, size_t bytes) {
  note("copy", device, streams[device], bytes);
  std::memcpy(to, from, bytes);
}

extern "C" const char* fake_notes() {
  static std::string said;
  said = std::move(notes);
  notes.clear();
  return said.c_str();
}
