// lend: a tensor over another one's memory that takes a copy of its own when it is first written.
#include "ops/torch.h"

#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>

#include <memory>
#include <tuple>

namespace ckptfused {
namespace {

using at::Tensor;

namespace cow = c10::impl::cow;

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
};

void end_loan(void* pointer) {
  std::unique_ptr<Loan> loan(static_cast<Loan*>(pointer));
  const auto borrower = loan->borrower.lock();
  if (borrower && borrower->data_ptr().get_context() == loan->reference.get_context()) {
    try {
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
  const auto pointer = [&](void* context, c10::DeleterFnPtr deleter) {
    return at::DataPtr(data, context, deleter, x.device());
  };
  const auto storage = [&](at::DataPtr p) {
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), end - begin,
                                                 std::move(p), copy.storage().allocator(),
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
      Loan{std::move(second), c10::weak_intrusive_ptr<c10::StorageImpl>(borrower)});
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
