#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ckptfused {

// Whether a thread takes float subnormals for zeros (torch.set_flush_denormal), in the processor's
// own terms.
struct SubnormalMode {
  uint64_t bits = 0;

  bool operator!=(const SubnormalMode& other) const { return bits != other.bits; }

#if defined(__SSE2__)
  static SubnormalMode of_thread() { return {_mm_getcsr() & kFlush}; }
  void set() const { _mm_setcsr((_mm_getcsr() & ~kFlush) | unsigned(bits)); }

 private:
  static constexpr unsigned kFlush = 0x8040;  // results, operands
#elif defined(__aarch64__)
  static SubnormalMode of_thread() { return {control() & kFlush}; }
  void set() const {
    const uint64_t wanted = (control() & ~kFlush) | bits;
    asm volatile("msr fpcr, %0" : : "r"(wanted));
  }

 private:
  static constexpr uint64_t kFlush = uint64_t(1) << 24;
  static uint64_t control() {
    uint64_t value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
#else
  static SubnormalMode of_thread() { return {}; }
  void set() const {}
#endif
};

// While one lives, its thread is in that mode.
class SubnormalModeGuard {
 public:
  explicit SubnormalModeGuard(SubnormalMode mode) : previous_(SubnormalMode::of_thread()) {
    if ((changed_ = mode != previous_)) mode.set();
  }
  ~SubnormalModeGuard() {
    if (changed_) previous_.set();
  }
  SubnormalModeGuard(const SubnormalModeGuard&) = delete;
  SubnormalModeGuard& operator=(const SubnormalModeGuard&) = delete;

 private:
  SubnormalMode previous_;
  bool changed_;
};

}  // namespace ckptfused
