#include "ops/torch.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "block/ops.h"

namespace ckptfused::call {
namespace {

using Key = std::tuple<int, at::ScalarType, int64_t, int64_t, int64_t, std::string>;

// What Python answered. A choice is one for forward and backward, whose threads differ.
struct Choices {
  std::mutex mutex;
  std::map<Key, std::string> found;
};
Choices& choices() {
  static auto* all = new Choices;  // of threads that may outlive static destructors
  return *all;
}

}  // namespace

std::string ffn_choice(const Tensor& like, at::ScalarType dtype, int64_t n, int64_t c, int64_t f,
                       std::string_view act) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("ckptfused::ffn_choice", "");
  // A count asks for the device that it is for; where there is none, it is the platform's products.
  const OptTensor there = like_there(like);
  if (!there.has_value()) return "cublas";
  const auto key = there->is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  if (!handle.hasKernelForDispatchKey(key)) return "cublas";

  const Key shape(there->get_device(), dtype, n, c, f, std::string(act));
  Choices& known = choices();
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.found.find(shape);
    if (found != known.found.end()) return found->second;
  }
  static const auto op = handle.typed<std::string(const Tensor&, at::ScalarType, int64_t, int64_t,
                                                  int64_t, std::string_view)>();
  const std::string choice =
      op.call(*there, dtype, n, c, f, act);  // without the lock: Python's own
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.found.insert_or_assign(shape, choice).first->second;
}

void forget_ffn_choices() {
  const std::lock_guard<std::mutex> lock(choices().mutex);
  choices().found.clear();
}

}  // namespace ckptfused::call
