#pragma once

#include "ops/torch.h"

#include <array>
#include <unordered_map>
#include <vector>

// A block is counted by running it on meta tensors, for a named device, while a Ledger is open:
// everything below then writes down what it would allocate, multiply and launch there. Code that
// runs for both asks the functions at the end of this file, and nothing else, which it is.

namespace ckptfused {

// The device that a count is for.
struct CountedDevice {
  // Attention on a GPU is not C++: what its kernels allocate, and how many there are.
  struct Attention {
    int64_t scratch = 0, launches = 1;
  };

  bool cuda = false;
  int64_t threads = 1;                     // of a CPU
  int64_t multiprocessors = 1;             // of a GPU
  std::optional<at::Tensor> like;          // an empty tensor there, if there is such a device
  Attention attention_fwd, attention_bwd;  // on a GPU
  bool cut_ffn = true;                     // false: the FFN half in one piece, whatever its size
};

class Ledger {
 public:
  enum Kind : int64_t { allocation, release, product, attention, low_rank, launch };
  struct Event {
    Kind kind;
    const char* name;  // of static storage
    int64_t slot;      // the parameter that the name is about, or -1
    // allocation, release: number of the buffer, bytes. product: rows, columns, depth, bytes that
    // its result is more than a product's in the type of its operands: of a wider one those
    // written, of a sum those read. attention: batch, heads, queries, head width, products a head,
    // keys.
    // low_rank: rows, columns, depth, rank. launch: bytes of the tensors that it is given, each
    // time.
    std::array<int64_t, 6> sizes;
    at::ScalarType dtype = at::ScalarType::Undefined;  // of a product's operands
  };

  // Opens a ledger for this thread until it is destroyed. Meta tensors that are allocated meanwhile
  // are in it, PyTorch's own results too, and so is what PyTorch's operators launch.
  explicit Ledger(CountedDevice device);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // This thread's open ledger, or null.
  static Ledger* current() { return current_; }

  const CountedDevice& device() const { return device_; }
  // Of the call that comes next: attention's costs are those of its sizes.
  void set_attention(CountedDevice::Attention fwd, CountedDevice::Attention bwd) {
    device_.attention_fwd = fwd;
    device_.attention_bwd = bwd;
  }
  const std::vector<Event>& events() const { return events_; }
  // Of the buffer that a tensor's storage is, if it began under this ledger.
  std::optional<int64_t> number_of(const at::Tensor& t) const;
  // What an operator has made so far is no temporary of its own.
  // by_autograd: what it made may be a sum of gradients.
  void op_ran(bool by_autograd) {
    first_ = buffers_;
    if (!by_autograd) sum_ = -1;
  }
  void add(Kind kind, std::array<int64_t, 6> sizes, at::ScalarType dtype = at::kFloat);
  void launched(const char* name, int64_t times = 1, int64_t bytes = 0);

  // The first launch while one lives is given these bytes of tensors.
  class Given {
   public:
    template <typename... Arguments>
    explicit Given(const Arguments&... arguments) : ledger_(*current()) {
      ledger_.given_ = (bytes(arguments) + ... + 0);
    }
    ~Given() { ledger_.given_ = 0; }
    Given(const Given&) = delete;
    Given& operator=(const Given&) = delete;

   private:
    template <typename T>
    static int64_t bytes(const T&) {
      return 0;
    }
    static int64_t bytes(const at::Tensor& t) { return t.defined() ? int64_t(t.nbytes()) : 0; }
    static int64_t bytes(at::TensorList list) {
      int64_t all = 0;
      for (const at::Tensor& t : list) all += bytes(t);
      return all;
    }
    static int64_t bytes(const std::optional<at::Tensor>& t) { return t ? bytes(*t) : 0; }

    Ledger& ledger_;
  };

  // What is written down while one lives has this name. Outside of a count it does nothing.
  class Name {
   public:
    explicit Name(const char* name, int64_t slot = -1);
    ~Name();
    Name(const Name&) = delete;
    Name& operator=(const Name&) = delete;

   private:
    Ledger* ledger_;
    const char* name_ = nullptr;
    int64_t slot_ = -1;
  };

 private:
  struct Buffer;
  bool reused(const Buffer& buffer);
  int64_t resolved(int64_t number) const {
    const auto place = renamed_.find(number);
    return place == renamed_.end() ? number : place->second;
  }
  friend struct MetaMemory;
  friend struct OperatorCalls;
  void forget(const Buffer& buffer);
  std::vector<Event>::iterator allocation_of(int64_t number);
  const char* name() const { return name_ != nullptr ? name_ : operator_; }

  static thread_local Ledger* current_;
  CountedDevice device_;
  Ledger* outer_;
  int64_t number_;  // among all ledgers
  std::vector<Event> events_;
  const char* name_ = nullptr;
  int64_t slot_ = -1;
  int64_t given_ = 0;
  const char* operator_ = "";      // PyTorch's that runs, the outermost
  int64_t depth_ = 0, first_ = 0;  // of operators within one another; its first buffer
  int64_t nodes_ = 0;              // of autograd's graph that run, within one another
  std::unordered_map<int64_t, int64_t> renamed_;  // buffers that took another one's place
  int64_t buffers_ = 0;
  int64_t sum_ = -1;  // of gradients: its buffer, where nothing has begun or ended since; or -1
  at::CallbackHandle operators_;
};

// Whether this thread counts: there are no values, and nothing is to be computed.
inline bool counting() {
  return Ledger::current() != nullptr;
}
// Whether the work on t is a CPU's: that of the device that is counted for, where that is so.
inline bool on_cpu(const at::Tensor& t) {
  return counting() ? !Ledger::current()->device().cuda : t.is_cpu();
}
// Where a CPU's memory is.
inline at::Device host() {
  return counting() ? at::kMeta : at::kCPU;
}
// How many threads a CPU's work is for.
int64_t cpu_threads();
// While a ledger is open for a GPU: how many multiprocessors it has.
int64_t counted_multiprocessors();
// An empty tensor on the device that the work on t is for, if there is such a device: t itself.
std::optional<at::Tensor> like_there(const at::Tensor& t);
// Whether a count is of an FFN half in one piece, whatever its size.
inline bool counts_whole_ffn() {
  return counting() && !Ledger::current()->device().cut_ffn;
}
// Whether this thread counts; if so, these launches of a kernel are written down. bytes: of the
// tensors that one is given.
bool counted_launch(const char* name, int64_t bytes = 0, int64_t times = 1);
// Likewise work of a kind.
bool counted_work(Ledger::Kind kind, std::array<int64_t, 6> sizes,
                  at::ScalarType dtype = at::kFloat);

}  // namespace ckptfused
