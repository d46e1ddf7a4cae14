#include "ops/torch.h"

#include "ops/ledger.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/engine.h>

namespace ckptfused {

thread_local Ledger* Ledger::current_ = nullptr;

namespace {

constexpr const char* kAccumulation = "sum of gradients";

}  // namespace

// A meta tensor's memory, of which there is none: while a ledger is open, its beginning and end.
struct Ledger::Buffer {
  int64_t ledger, number, bytes;

  static void release(void* context) {
    const std::unique_ptr<Buffer> buffer(static_cast<Buffer*>(context));
    Ledger* ledger = Ledger::current();
    if (ledger == nullptr || ledger->number_ != buffer->ledger) return;
    if (ledger->depth_ > 0 && buffer->number >= ledger->first_) return ledger->forget(*buffer);
    if (ledger->depth_ == 0 && ledger->reused(*buffer)) return;
    ledger->events_.push_back(
        {Ledger::release, "", -1, {ledger->resolved(buffer->number), buffer->bytes}});
  }
};

// In place of PyTorch's allocator of meta memory, which it asks where nothing is counted.
struct MetaMemory final : at::Allocator {
  explicit MetaMemory(at::Allocator* plain) : plain_(plain) {}

  at::DataPtr allocate(size_t bytes) override {
    Ledger* ledger = Ledger::current();
    if (ledger == nullptr || bytes == 0) return plain_->allocate(bytes);
    auto* buffer = new Ledger::Buffer{ledger->number_, ledger->buffers_++, int64_t(bytes)};
    ledger->add(Ledger::allocation, {buffer->number, buffer->bytes});
    ledger->sum_ = ledger->name() == kAccumulation ? buffer->number : -1;
    return {nullptr, buffer, &Ledger::Buffer::release, at::Device(at::kMeta)};
  }
  at::DeleterFnPtr raw_deleter() const override { return plain_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    plain_->copy_data(to, from, bytes);
  }

  static void install() {
    static MetaMemory memory(c10::GetAllocator(at::kMeta));
    static const bool once = (c10::SetAllocator(at::kMeta, &memory), true);
    (void)once;
  }

 private:
  at::Allocator* plain_;
};

// PyTorch's operators that launch a kernel; the others make views or memory, or call these.
struct OperatorCalls {
  static constexpr std::string_view kLaunching[] = {"aten::copy_", "aten::fill_",  "aten::zero_",
                                                    "aten::sum",   "aten::add_",   "aten::mul_",
                                                    "aten::mm",    "aten::addmm_", "aten::addmm"};

  // Whether what it makes within itself is nobody else's affair: it is a kernel of PyTorch's, not
  // made of other operators, on which autograd works one by one.
  static bool has_kernel(const at::RecordFunction& function) {
    static thread_local std::unordered_map<std::string, bool> known;
    const std::optional<c10::OperatorName> op = function.operator_name();
    if (!op) return false;
    const auto [place, is_new] = known.try_emplace(op->name + "." + op->overload_name, false);
    if (!is_new) return place->second;
    const auto handle = c10::Dispatcher::singleton().findOp(*op);
    const bool composed =
        handle && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    return place->second = !composed && op->name.rfind("ckptfused::", 0) != 0;
  }

  struct Within final : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    Ledger* ledger = Ledger::current();
    if (ledger == nullptr) return nullptr;
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      ++ledger->nodes_;
      return std::make_unique<Within>();
    }
    if (!has_kernel(function)) return nullptr;
    if (ledger->depth_++ == 0) {
      ledger->operator_ = adds_gradients(*ledger, function) ? kAccumulation : function.name();
      ledger->first_ = ledger->buffers_;
    }
    if (counts(*ledger, function.name())) ledger->launched(function.name(), 1, bytes_of(function));
    return std::make_unique<Within>();
  }
  // On meta tensors cat and _foreach_copy_ copy their parts one by one; so does the latter on a
  // CPU.
  static bool counts(const Ledger& ledger, std::string_view name) {
    const std::string_view outer = ledger.operator_;
    const bool is_part = ledger.depth_ > 1;
    if (outer == "aten::cat") return !is_part;
    if (outer == "aten::_foreach_copy_") return ledger.device_.cuda != is_part;
    return std::find(std::begin(kLaunching), std::end(kLaunching), name) != std::end(kLaunching);
  }
  // Of a sparse tensor its parts count, in operations of their own.
  static int64_t bytes_of(const at::Tensor& t) {
    return t.defined() && t.layout() == at::kStrided ? int64_t(t.nbytes()) : 0;
  }
  // What it adds to is read and written.
  static int64_t bytes_of(const at::RecordFunction& function) {
    int64_t bytes = 0;
    for (const c10::IValue& input : function.inputs()) {
      if (input.isTensor()) bytes += bytes_of(input.toTensor());
      if (input.isTensorList()) {
        for (const at::Tensor& t : input.toTensorVector()) bytes += bytes_of(t);
      }
    }
    const bool adds = std::string_view(function.name()) == "aten::add_";
    return adds ? bytes + bytes_of(function.inputs()[0].toTensor()) : bytes;
  }
  // Whether it is autograd itself, between the nodes of its graph, that adds a gradient to one of
  // which nobody else holds the memory: not where it makes a graph of that (`create_graph`). Of a
  // view the tensor that it is a view of does: that of a head's weight, the transpose of a product.
  static bool adds_gradients(const Ledger& ledger, const at::RecordFunction& function) {
    return ledger.nodes_ == 0 && torch::autograd::get_current_graph_task_id() != -1 &&
           !at::GradMode::is_enabled() && std::string_view(function.name()) == "aten::add" &&
           !function.inputs()[0].toTensor().is_view();
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* within) {
    Ledger* ledger = Ledger::current();
    if (ledger == nullptr || within == nullptr) return;
    if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
      --ledger->nodes_;
      return;
    }
    if (--ledger->depth_ == 0) ledger->operator_ = "";
  }
};

namespace {

int64_t next_number() {
  static std::atomic<int64_t> counter{0};
  return counter++;
}

}  // namespace

Ledger::Ledger(CountedDevice device)
    : device_(std::move(device)), outer_(current_), number_(next_number()) {
  MetaMemory::install();
  operators_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&OperatorCalls::begin, &OperatorCalls::end)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  current_ = this;
}

Ledger::~Ledger() {
  current_ = outer_;
  at::removeCallback(operators_);
}

std::optional<int64_t> Ledger::number_of(const at::Tensor& t) const {
  const at::DataPtr& data = t.storage().data_ptr();
  if (data.get_deleter() != &Buffer::release) return std::nullopt;
  const auto* buffer = static_cast<const Buffer*>(data.get_context());
  if (buffer->ledger != number_) return std::nullopt;
  return resolved(buffer->number);
}

void Ledger::add(Kind kind, std::array<int64_t, 6> sizes, at::ScalarType dtype) {
  events_.push_back({kind, name(), slot_, sizes, dtype});
}

void Ledger::launched(const char* name, int64_t times, int64_t bytes) {
  for (int64_t i = 0; i < times; ++i) {
    events_.push_back({launch, name, -1, {bytes + std::exchange(given_, 0)}});
  }
}

int64_t cpu_threads() {
  return counting() ? Ledger::current()->device().threads : at::get_num_threads();
}

int64_t counted_multiprocessors() {
  return Ledger::current()->device().multiprocessors;
}

std::optional<at::Tensor> like_there(const at::Tensor& t) {
  return counting() ? Ledger::current()->device().like : t;
}

bool counted_launch(const char* name, int64_t bytes, int64_t times) {
  if (counting()) Ledger::current()->launched(name, times, bytes);
  return counting();
}

bool counted_work(Ledger::Kind kind, std::array<int64_t, 6> sizes, at::ScalarType dtype) {
  if (counting()) Ledger::current()->add(kind, sizes, dtype);
  return counting();
}

// What one of PyTorch's operators allocates and frees within itself is its own affair: meta kernels
// have other temporaries than the device's.
void Ledger::forget(const Buffer& buffer) {
  events_.erase(allocation_of(buffer.number));
}

std::vector<Ledger::Event>::iterator Ledger::allocation_of(int64_t number) {
  const auto made = std::find_if(events_.rbegin(), events_.rend(), [&](const Event& e) {
    return e.kind == allocation && e.sizes[0] == number;
  });
  return std::next(made).base();
}

// Autograd adds a gradient to one that nobody else holds in place, but for meta tensors: there the
// sum is a new one, and one of the two ends at once, before anything else begins or ends.
bool Ledger::reused(const Buffer& buffer) {
  const int64_t sum = std::exchange(sum_, -1);
  if (sum < 0) return false;
  const auto made = allocation_of(sum);
  if (made->sizes[1] != buffer.bytes) return false;
  renamed_[sum] = resolved(buffer.number);
  events_.erase(made);
  return true;
}

Ledger::Name::Name(const char* name, int64_t slot) : ledger_(Ledger::current()) {
  if (ledger_ == nullptr) return;
  name_ = std::exchange(ledger_->name_, name);
  slot_ = std::exchange(ledger_->slot_, slot);
}

Ledger::Name::~Name() {
  if (ledger_ == nullptr) return;
  ledger_->name_ = name_;
  ledger_->slot_ = slot_;
}

}  // namespace ckptfused
