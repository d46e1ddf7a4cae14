// lend: a tensor over another one's memory that takes a copy of its own when it is first written.
#include "ops/torch.h"

#include <ATen/ops/copy_ops.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace ckptfused {
namespace {

using at::Tensor;

namespace cow = c10::impl::cow;

// Makes the copies of what was lent on a device that works through streams: there PyTorch's own
// allocator copies without a stream, on whichever device is current, and waits for the GPU. Here
// the copy is one more piece of work on the current stream of the memory's own device.
class StreamCopies final : public c10::Allocator {
 public:
  // A storage keeps the address of its allocator, so they stay: one for each stream that lends.
  static c10::Allocator* of(c10::Allocator* memory, c10::Stream lender) {
    using Key = std::tuple<c10::Allocator*, c10::DeviceIndex, c10::StreamId>;
    static std::mutex& mutex = *new std::mutex;
    static auto& all = *new std::map<Key, std::unique_ptr<StreamCopies>>;
    const std::lock_guard lock(mutex);
    auto& found = all[{memory, lender.device_index(), lender.id()}];
    if (found == nullptr) found.reset(new StreamCopies(memory, lender));
    return found.get();
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::OptionalDeviceGuard guard(lender_.device());
    c10::DataPtr made = memory_->allocate(bytes);
    // Freed, it is the current stream's again, which may not be the one that still reads it.
    const c10::impl::VirtualGuardImpl device(lender_.device_type());
    if (device.getStream(lender_.device()) != lender_) device.recordDataPtrOnStream(made, lender_);
    return made;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const c10::OptionalDeviceGuard guard(lender_.device());
    const auto options = at::device(lender_.device()).dtype(at::kByte);
    const auto tensor = [&](void* data) {
      return at::for_blob(data, {int64_t(bytes)})
          .options(options)
          .target_device(lender_.device())
          .make_tensor();
    };
    Tensor copy = tensor(to);
    // Straight to the device's kernel: no mode that is on where the write is may see this.
    at::_ops::copy_::redispatch(copy.key_set() & c10::after_ADInplaceOrView_keyset, copy,
                                tensor(const_cast<void*>(from)), /*non_blocking=*/true);
  }

 private:
  StreamCopies(c10::Allocator* memory, c10::Stream lender) : memory_(memory), lender_(lender) {}

  c10::Allocator* memory_;
  c10::Stream lender_;
};

// Keeps some memory for as long as anybody borrows it: its storage, or a reference of its own where
// that storage only borrows it, too, and may let go of it.
struct Keep {
  explicit Keep(const c10::Storage& owner) {
    const at::DataPtr& p = owner.data_ptr();
    auto* context = p.cast_context<cow::COWDeleterContext>(&cow::cow_deleter);
    if (context == nullptr) {
      storage = owner;
    } else {
      context->increment_refcount();
      reference = at::DataPtr(const_cast<void*>(p.get()), context, &cow::cow_deleter, p.device());
    }
  }
  static void release(void* keep) { delete static_cast<Keep*>(keep); }

  c10::Storage storage;
  at::DataPtr reference;
};

// Between the owner of some memory, which knows nothing of it, and one borrower. The borrower's
// storage is copy-on-write with two references for as long as the loan lasts, so a write to it
// always copies and never takes the memory over. The owner's storage is only read: other threads
// may use it meanwhile.
struct Loan {
  at::DataPtr reference;  // the second one
  c10::weak_intrusive_ptr<c10::StorageImpl> borrower;
  std::optional<c10::Stream> stream;  // where the device has streams
};

void end_loan(void* pointer) {
  std::unique_ptr<Loan> loan(static_cast<Loan*>(pointer));
  const auto borrower = loan->borrower.lock();
  if (borrower && borrower->data_ptr().get_context() == loan->reference.get_context()) {
    try {
      // It may end anywhere, in a collection of garbage even: what was lent is valid on this
      // stream.
      const c10::OptionalStreamGuard guard(loan->stream);
      borrower->mutable_data();  // copies
    } catch (...) {
      // There is no memory for the copy. What was lent has to stay, and a deleter must not throw.
      loan.release();
    }
  }
}

// Vectorised kernels see the same alignment in the copy as in the owner's memory.
constexpr int64_t kAlignment = 64;

void copies_on_write([[maybe_unused]] c10::StorageImpl& storage) {
#if __has_include(<c10/core/StorageMaterializer.h>)
  storage.set_materializer([](c10::StorageImpl* s) {
    // A resize has given it memory of its own already.
    if (cow::is_cow_data_ptr(s->data_ptr())) cow::materialize_cow(s);
  });
#endif  // up to PyTorch 2.11 the deleter says so
}

std::tuple<Tensor, Tensor> lend(const Tensor& x) {
  const c10::Storage& owner = x.storage();
  const int64_t size = x.element_size(), offset = x.storage_offset();
  const int64_t end = at::detail::computeStorageNbytes(x.sizes(), x.strides(), size, offset);
  TORCH_CHECK(int64_t(owner.nbytes()) >= end,
              "ckptfused: expected a tensor whose data is allocated, got one that needs ", end,
              " bytes in a storage of ", owner.nbytes());
  const int64_t begin = offset * size / kAlignment * kAlignment;
  void* data = const_cast<char*>(static_cast<const char*>(owner.data()) + begin);
  Tensor copy = at::empty({0}, x.options()), guard = at::empty({0}, x.options());
  c10::Allocator* allocator = copy.storage().allocator();
  std::optional<c10::Stream> stream;
  if (!x.is_cpu()) {
    stream = c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
    allocator = StreamCopies::of(allocator, *stream);
  }
  const auto pointer = [&](void* context, c10::DeleterFnPtr deleter) {
    return at::DataPtr(data, context, deleter, x.device());
  };
  const auto storage = [&](at::DataPtr p) {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), end - begin,
                                                 std::move(p), allocator,
                                                 /*resizable=*/true);
  };
  auto* context = new cow::COWDeleterContext(
      std::unique_ptr<void, c10::DeleterFnPtr>(new Keep(owner), &Keep::release));
  at::DataPtr first = pointer(context, &cow::cow_deleter);
  context->increment_refcount();
  at::DataPtr second = pointer(context, &cow::cow_deleter);
  auto borrower = storage(std::move(first));
  copies_on_write(*borrower);
  auto loan = std::make_unique<Loan>(
      Loan{std::move(second), c10::weak_intrusive_ptr<c10::StorageImpl>(borrower), stream});
  auto lender = storage(pointer(loan.get(), &end_loan));
  loan.release();
  copy.set_(c10::Storage(std::move(borrower)), offset - begin / size, x.sizes(), x.strides());
  guard.set_(c10::Storage(std::move(lender)), 0, {0}, {1});
  return {copy, guard};
}

struct Lend : torch::autograd::Function<Lend> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("ckptfused::lend", "")
                               .typed<std::tuple<Tensor, Tensor>(const Tensor&)>();
    auto [copy, loan] = op.call(x);
    ctx->mark_non_differentiable({loan});
    return {copy, loan};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    return {grads[0]};
  }
};

std::tuple<Tensor, Tensor> lend_autograd(const Tensor& x) {
  torch::autograd::variable_list made = Lend::apply(x);
  return {made[0], made[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("lend", TORCH_FN(lend));
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("lend", TORCH_FN(lend));
}
TORCH_LIBRARY_IMPL(ckptfused, Autograd, m) {
  m.impl("lend", TORCH_FN(lend_autograd));
}

}  // namespace ckptfused
