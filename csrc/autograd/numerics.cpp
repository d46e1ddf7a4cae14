#include "ops/torch.h"

#include "autograd/numerics.h"

#include <ATen/Context.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>

#include "ops/attention_gpu.h"

namespace ckptfused {
namespace {

using at::Context;
using at::CuBLASReductionOption;
using at::Float32Backend;
using at::Float32MatmulPrecision;
using at::Float32Op;
using at::Float32Precision;

// A setting of the process.
struct Setting {
  int64_t (*get)(Context&);
  void (*set)(Context&, int64_t);
};

// Where a value is not a backend's own but PyTorch's for all, the backend's is none.
template <Float32Backend kBackend>
constexpr Setting kPrecision = {
    [](Context& c) { return int64_t(c.float32Precision(kBackend, Float32Op::MATMUL)); },
    [](Context& c, int64_t value) {
      const auto precision = Float32Precision(value);
      const bool shared = c.float32Precision(kBackend, Float32Op::ALL) == precision;
      // "none" would take over what holds for all, which may be something else by now.
      const auto own = precision == Float32Precision::NONE ? Float32Precision::IEEE : precision;
      c.setFloat32Precision(kBackend, Float32Op::MATMUL, shared ? Float32Precision::NONE : own);
    }};

template <CuBLASReductionOption (Context::*kGet)() const, void (Context::*kSet)(bool, bool)>
constexpr Setting kReduction = {
    [](Context& c) { return int64_t((c.*kGet)()); },
    [](Context& c, int64_t value) {
      const auto option = CuBLASReductionOption(value);
      (c.*kSet)(option == CuBLASReductionOption::AllowReducedPrecisionWithSplitK,
                option != CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
    }};

template <bool (Context::*kGet)() const, void (Context::*kSet)(bool)>
constexpr Setting kFlag = {[](Context& c) { return int64_t((c.*kGet)()); },
                           [](Context& c, int64_t value) { (c.*kSet)(value != 0); }};

constexpr Setting kDeterministic = {
    [](Context& c) {
      return int64_t(c.deterministicAlgorithms()) +
             2 * int64_t(c.deterministicAlgorithmsWarnOnly());
    },
    [](Context& c, int64_t value) { c.setDeterministicAlgorithms(value & 1, value & 2); }};

constexpr Setting kBlas = {
    [](Context& c) { return int64_t(c.blasPreferredBackend()); },
    [](Context& c, int64_t value) { c.setBlasPreferredBackend(at::BlasBackend(value)); }};

// The order in which scaled_dot_product_attention tries its kernels, a digit each; none before it
// is anybody's.
constexpr int64_t kNoOrder = -1, kFirstOrder = 12034;
constexpr Setting kAttentionOrder = {[](Context& c) {
                                       if (attention_order_is_the_first()) return kNoOrder;
                                       int64_t digits = 0;
                                       for (const at::SDPBackend backend : c.sDPPriorityOrder()) {
                                         digits = digits * 10 + int64_t(backend);
                                       }
                                       return digits;
                                     },
                                     [](Context& c, int64_t digits) {
                                       if (digits == kNoOrder) digits = kFirstOrder;
                                       std::vector<int64_t> order(at::num_sdp_backends);
                                       for (auto place = order.rbegin(); place != order.rend();
                                            ++place, digits /= 10) {
                                         *place = digits % 10;
                                       }
                                       c.setSDPPriorityOrder(order);
                                     }};

constexpr Setting kProcess[] = {
    kPrecision<Float32Backend::MKLDNN>,
    kPrecision<Float32Backend::CUDA>,
    kFlag<&Context::userEnabledMkldnn, &Context::setUserEnabledMkldnn>,
    kFlag<&Context::deterministicMkldnn, &Context::setDeterministicMkldnn>,
    kDeterministic,
    kReduction<&Context::allowFP16ReductionCuBLAS, &Context::setAllowFP16ReductionCuBLAS>,
    kReduction<&Context::allowBF16ReductionCuBLAS, &Context::setAllowBF16ReductionCuBLAS>,
    kFlag<&Context::allowFP16AccumulationCuBLAS, &Context::setAllowFP16AccumulationCuBLAS>,
    kFlag<&Context::allowFP16ReductionCPU, &Context::setAllowFP16ReductionCPU>,
    kBlas,
    kFlag<&Context::userEnabledFlashSDP, &Context::setSDPUseFlash>,
    kFlag<&Context::userEnabledMemEfficientSDP, &Context::setSDPUseMemEfficient>,
    kFlag<&Context::userEnabledMathSDP, &Context::setSDPUseMath>,
    kFlag<&Context::userEnabledCuDNNSDP, &Context::setSDPUseCuDNN>,
    kAttentionOrder,
};
constexpr size_t kPrecisions = 2;  // the first of them

// Those of the calling thread come first.
enum : size_t { kThreads, kSubnormals, kProcessBegin };
constexpr size_t kOrder = kProcessBegin + std::size(kProcess) - 1;  // kAttentionOrder

bool precision_differs(const Settings& a, const Settings& b) {
  return !std::equal(&a[kProcessBegin], &a[kProcessBegin] + kPrecisions, &b[kProcessBegin]);
}

// Nothing where PyTorch refuses to say, since the backends' values were set one by one.
std::optional<Float32MatmulPrecision> matmul_precision() {
  try {
    return at::globalContext().float32MatmulPrecision();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

// What goes with the backends' values: PyTorch checks that they agree.
Float32MatmulPrecision matmul_precision_of(const Settings& settings) {
  const auto has = [&](Float32Precision precision) {
    const int64_t* values = &settings[kProcessBegin];
    return std::find(values, values + kPrecisions, int64_t(precision)) != values + kPrecisions;
  };
  if (has(Float32Precision::BF16)) return Float32MatmulPrecision::MEDIUM;
  return has(Float32Precision::TF32) ? Float32MatmulPrecision::HIGH
                                     : Float32MatmulPrecision::HIGHEST;
}

void set_precision(const Settings& to, std::optional<Float32MatmulPrecision> name) {
  Context& context = at::globalContext();
  if (name == Float32MatmulPrecision::HIGHEST) context.setFloat32MatmulPrecision("highest");
  if (name == Float32MatmulPrecision::HIGH) context.setFloat32MatmulPrecision("high");
  if (name == Float32MatmulPrecision::MEDIUM) context.setFloat32MatmulPrecision("medium");
  for (size_t i = 0; i < kPrecisions; ++i) kProcess[i].set(context, to[kProcessBegin + i]);
}

void set_others(const Settings& from, const Settings& to) {
  for (size_t i = kPrecisions; i < std::size(kProcess); ++i) {
    const int64_t value = to[kProcessBegin + i];
    if (value != from[kProcessBegin + i]) kProcess[i].set(at::globalContext(), value);
  }
}

bool same_for_process(const Settings& a, const Settings& b) {
  return std::equal(a.begin() + kProcessBegin, a.end(), b.begin() + kProcessBegin, b.end());
}

// As `here` says it where `wanted` leaves it open. No order is none that differs: PyTorch may have
// put its own in place since.
Settings completed(Settings wanted, const Settings& here) {
  TORCH_CHECK(wanted.size() == here.size(), "ckptfused: expected ", here.size(), " settings, got ",
              wanted.size());
  if (wanted[kOrder] == kNoOrder) wanted[kOrder] = here[kOrder];
  return wanted;
}

thread_local int64_t held_here = 0;  // guards of this thread

}  // namespace

// What guards set for the process, the last on top. Guards that want the same share a level, and
// the last of them to go sets back what the first one found.
struct SettingsGuard::Level {
  Settings previous, wanted;
  // What torch.get_float32_matmul_precision() said, where the precision of products is changed.
  std::optional<Float32MatmulPrecision> matmul_precision;
  int64_t guards = 0;
};

struct SettingsGuard::Process {
  std::mutex mutex;
  std::condition_variable left;
  std::list<Level> levels;
  int64_t guards = 0;

  static Process& get() {
    static Process& all = *new Process;  // a thread may still compute while the process ends
    return all;
  }

  // Whether what is wanted is in force, and stays so.
  bool joins(const Settings& wanted, const Settings& here) const {
    return !levels.empty() && same_for_process(levels.back().wanted, wanted) &&
           same_for_process(here, wanted);
  }

  // Until no guard of another thread needs other settings; returns whether it waited. A thread that
  // holds Python's lock lets go of it meanwhile: the other may be in Python.
  bool wait(std::unique_lock<std::mutex>& lock, const Settings& wanted) {
    constexpr std::chrono::minutes kLimit(10);
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    const auto free = [&] { return guards == held_here || joins(wanted, current_settings()); };
    bool waited = false;
    while (!free()) {
      waited = true;
      TORCH_CHECK(std::chrono::steady_clock::now() < deadline,
                  "ckptfused: backward has to run under the settings of its forward, but for ",
                  kLimit.count(), " minutes another thread has computed under other ones (matmul ",
                  "precision, deterministic algorithms, allowed libraries), which the process has "
                  "but once");
      lock.unlock();
      {
        std::optional<pybind11::gil_scoped_release> without_python;
        if (Py_IsInitialized() && PyGILState_Check()) without_python.emplace();
        lock.lock();
        left.wait_until(lock, deadline, free);
        lock.unlock();  // in this order: whoever has Python's lock may want this one
      }
      lock.lock();
    }
    return waited;
  }
};

Settings current_settings() {
  // A thread's first use of at::parallel_for sets its number of threads. Each library has a flag of
  // its own for that: here it is ours, get_num_threads() asks PyTorch's.
  at::internal::lazy_init_num_threads();
  Settings settings;
  settings.reserve(kProcessBegin + std::size(kProcess));
  settings.push_back(at::get_num_threads());
  settings.push_back(int64_t(SubnormalMode::of_thread().bits));
  for (const Setting& setting : kProcess) settings.push_back(setting.get(at::globalContext()));
  return settings;
}

SettingsGuard::SettingsGuard() {
  Process& process = Process::get();
  const std::lock_guard lock(process.mutex);
  settings_ = current_settings();
  hold(process, settings_);
}

SettingsGuard::SettingsGuard(const Settings& wanted) {
  Process& process = Process::get();
  std::unique_lock lock(process.mutex);
  Settings here = current_settings();
  settings_ = completed(wanted, here);
  if (process.wait(lock, settings_)) {
    here = current_settings();
    settings_ = completed(wanted, here);
  }
  if (settings_[kThreads] != here[kThreads]) {
    threads_ = std::make_unique<ThreadsGuard>(int(settings_[kThreads]));
  }
  if (settings_[kSubnormals] != here[kSubnormals]) {
    subnormals_ =
        std::make_unique<SubnormalModeGuard>(SubnormalMode{uint64_t(settings_[kSubnormals])});
  }
  hold(process, here);
}

void SettingsGuard::hold(Process& process, const Settings& here) {
  if (!process.joins(settings_, here)) {
    Level level{here, settings_, std::nullopt};
    if (precision_differs(level.wanted, level.previous)) {
      level.matmul_precision = matmul_precision();
      set_precision(level.wanted, level.matmul_precision
                                      ? std::optional(matmul_precision_of(level.wanted))
                                      : std::nullopt);
    }
    set_others(level.previous, level.wanted);
    process.levels.push_back(std::move(level));
  }
  level_ = &process.levels.back();
  ++level_->guards, ++process.guards, ++held_here;
}

SettingsGuard::~SettingsGuard() {
  Process& process = Process::get();
  {
    const std::lock_guard lock(process.mutex);
    --level_->guards, --process.guards, --held_here;
    while (!process.levels.empty() && process.levels.back().guards == 0) {
      const Level& top = process.levels.back();
      set_others(top.wanted, top.previous);
      if (precision_differs(top.wanted, top.previous)) {
        set_precision(top.previous, top.matmul_precision);
      }
      process.levels.pop_back();
    }
  }
  process.left.notify_all();
}

}  // namespace ckptfused
