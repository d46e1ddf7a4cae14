// copy_on_write: tensors over the memory of others, each with a copy of its own once it is written.
#include "ops/torch.h"

#include "autograd/made_copies.h"

#include <ATen/ops/copy_ops.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

namespace ckptfused {
namespace {

using at::Tensor;

namespace cow = c10::impl::cow;

// Makes the copies of shared memory on a device that works through streams: there PyTorch's own
// allocator copies without a stream, on whichever device is current, and waits for the GPU. Here
// the copy is one more piece of work on the current stream of the memory's own device.
class StreamCopies final : public c10::Allocator {
 public:
  // A storage keeps the address of its allocator, so they stay: one for each stream that shares.
  static c10::Allocator* of(c10::Allocator* memory, c10::Stream stream) {
    using Key = std::tuple<c10::Allocator*, c10::DeviceIndex, c10::StreamId>;
    static std::mutex& mutex = *new std::mutex;
    static auto& all = *new std::map<Key, std::unique_ptr<StreamCopies>>;
    const std::lock_guard lock(mutex);
    auto& found = all[{memory, stream.device_index(), stream.id()}];
    if (found == nullptr) found.reset(new StreamCopies(memory, stream));
    return found.get();
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::OptionalDeviceGuard guard(stream_.device());
    c10::DataPtr made = memory_->allocate(bytes);
    // Freed, it is the current stream's again, which may not be the one that still reads it.
    const c10::impl::VirtualGuardImpl device(stream_.device_type());
    if (device.getStream(stream_.device()) != stream_) device.recordDataPtrOnStream(made, stream_);
    return made;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const c10::OptionalDeviceGuard guard(stream_.device());
    const auto options = at::device(stream_.device()).dtype(at::kByte);
    const auto tensor = [&](void* data) {
      return at::for_blob(data, {int64_t(bytes)})
          .options(options)
          .target_device(stream_.device())
          .make_tensor();
    };
    Tensor copy = tensor(to);
    // Straight to the device's kernel: no mode that is on where the write is may see this.
    at::_ops::copy_::redispatch(copy.key_set() & c10::after_ADInplaceOrView_keyset, copy,
                                tensor(const_cast<void*>(from)), /*non_blocking=*/true);
  }

 private:
  StreamCopies(c10::Allocator* memory, c10::Stream stream) : memory_(memory), stream_(stream) {}

  c10::Allocator* memory_;
  c10::Stream stream_;
};

// Keeps some memory for as long as any copy shares it: its storage, or a reference of its own where
// that storage is such a copy's, too, and may let go of it.
std::unique_ptr<void, c10::DeleterFnPtr> owned(const c10::Storage& owner) {
  auto* context = owner.data_ptr().cast_context<cow::COWDeleterContext>(&cow::cow_deleter);
  if (context != nullptr) {
    context->increment_refcount();
    return {context, [](void* shared) { cow::cow_deleter(shared); }};  // it takes no cow_deleter
  }
  return {c10::Storage(owner).unsafeReleaseStorageImpl(), [](void* storage) {
            c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(storage));
          }};
}

// Between the owners of some memory, which know nothing of it, and copies. A copy's storage is
// copy-on-write with another reference for as long as this lives, so a write to it always copies
// and never takes the memory over. The owners' storages are only read: other threads may use them
// meanwhile. In the end a copy that still shares the memory gets its own.
class Sharing {
 public:
  using Owners = std::vector<std::unique_ptr<void, c10::DeleterFnPtr>>;

  explicit Sharing(size_t count)
      : owners_(new Owners),
        reference_(nullptr,
                   new cow::COWDeleterContext(
                       {owners_, [](void* owners) { delete static_cast<Owners*>(owners); }}),
                   &cow::cow_deleter, at::kCPU) {
    owners_->reserve(count);
    copies_.reserve(count);
  }
  Sharing(const Sharing&) = delete;
  ~Sharing() {
    bool shared = false;
    for (const auto& [storage, stream] : copies_) {
      const auto copy = storage.lock();
      if (copy == nullptr || copy->data_ptr().get_context() != reference_.get_context()) continue;
      try {
        // It may end anywhere, in a collection of garbage even: the memory is valid on this stream.
        const c10::OptionalStreamGuard guard(stream);
        copy->mutable_data();  // copies
      } catch (...) {
        // There is no memory for the copy, and a destructor must not throw.
        shared = true;
      }
    }
    if (shared) (void)reference_.release_context();  // what is shared has to stay
  }

  // Memory of this owner with a reference to it, for a copy.
  at::DataPtr memory(const c10::Storage& owner, void* data) {
    owners_->push_back(owned(owner));
    auto* context = static_cast<cow::COWDeleterContext*>(reference_.get_context());
    context->increment_refcount();
    return {data, context, &cow::cow_deleter, owner.device()};
  }
  void add(const c10::intrusive_ptr<c10::StorageImpl>& copy, std::optional<c10::Stream> stream) {
    copies_.emplace_back(copy, stream);
  }

 private:
  Owners* owners_;         // the reference's
  at::DataPtr reference_;  // one more than the copies have
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::optional<c10::Stream>>>
      copies_;  // and where the device has streams, the stream of the memory
};

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

Tensor share(const Tensor& x, Sharing& sharing) {
  const c10::Storage& owner = x.storage();
  const int64_t size = x.element_size(), offset = x.storage_offset();
  const int64_t end = at::detail::computeStorageNbytes(x.sizes(), x.strides(), size, offset);
  TORCH_CHECK(int64_t(owner.nbytes()) >= end,
              "ckptfused: expected a tensor whose data is allocated, got one that needs ", end,
              " bytes in a storage of ", owner.nbytes());
  const int64_t begin = offset * size / kAlignment * kAlignment;
  void* data = const_cast<char*>(static_cast<const char*>(owner.data()) + begin);
  c10::Allocator* allocator = c10::GetAllocator(x.device().type());
  std::optional<c10::Stream> stream;
  if (!x.is_cpu()) {
    stream = c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
    allocator = StreamCopies::of(allocator, *stream);
  }
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), end - begin, sharing.memory(owner, data), allocator,
      /*resizable=*/true);
  copies_on_write(*storage);
  sharing.add(storage, stream);
  Tensor copy = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)),
      c10::DispatchKeySet(x.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA), x.dtype());
  copy.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), offset - begin / size);
  return copy;
}

SharingCopies copy_on_write(at::TensorList tensors) {
  auto sharing = std::make_unique<Sharing>(tensors.size());
  std::vector<Tensor> copies;
  copies.reserve(tensors.size());
  for (const Tensor& x : tensors) copies.push_back(share(x, *sharing));
  at::DataPtr ends(
      nullptr, sharing.release(), [](void* all) { delete static_cast<Sharing*>(all); }, at::kCPU);
  Tensor guard = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, std::move(ends)),
      c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
  return {std::move(copies), std::move(guard)};
}

}  // namespace

SharingCopies call_copy_on_write(at::TensorList tensors) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ckptfused::copy_on_write", "")
                             .typed<SharingCopies(at::TensorList)>();
  return op.call(tensors);
}

namespace {

// The node of x.alias(): a copy's gradient is the original's.
template <typename Pointer = GradFn>
Pointer identity_of(const Tensor& x) {
  using torch::autograd::generated::AliasBackward0;
  torch::autograd::edge_list to = torch::autograd::collect_next_edges(x);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    torch::autograd::Node* made = new AliasBackward0(std::move(to));  // up to PyTorch 2.11
    return Pointer(made, [](auto* ended) { deleteNode(ended); });
  } else {
    return c10::make_intrusive<AliasBackward0>(std::move(to));
  }
}

SharingCopies copy_on_write_autograd(at::TensorList tensors) {
  SharingCopies made = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_copy_on_write(tensors);
  }();
  // From the last to the first: backward, which takes the youngest node first, finds them in order.
  for (size_t i = tensors.size(); i-- > 0;) {
    if (!at::GradMode::is_enabled() || !tensors[i].requires_grad()) continue;
    TORCH_CHECK(!torch::autograd::isFwGradDefined(tensors[i]),
                "ckptfused: copies on write have no forward-mode derivative");
    torch::autograd::set_history(std::get<0>(made)[i], identity_of(tensors[i]));
  }
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("copy_on_write", TORCH_FN(copy_on_write));
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("copy_on_write", TORCH_FN(copy_on_write));
}
TORCH_LIBRARY_IMPL(ckptfused, Autograd, m) {
  m.impl("copy_on_write", TORCH_FN(copy_on_write_autograd));
}

}  // namespace ckptfused
