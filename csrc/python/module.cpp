// Python module of the extension: importing it registers the ops. What is not an op is here.
#include "ops/torch.h"

#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd/numerics.h"
#include "block/block.h"
#include "block/count.h"
#include "block/ops.h"
#include "block/tiles.h"
#include "kernels/cpu/target.h"
#include "ops/attention.h"
#include "ops/attention_gpu.h"
#include "ops/cuda_build.h"
#include "ops/launch_records.h"
#include "ops/linear.h"

void bind_arguments(pybind11::module_& m);
void bind_byte_copies(pybind11::module_& m);
void bind_copy_on_write(pybind11::module_& m);
void bind_module_guard(pybind11::module_& m);
void bind_testing(pybind11::module_ testing);

namespace {

at::ScalarType dtype_named(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "uint8") return at::kByte;  // of weights that are stored in few bits
  TORCH_CHECK(name == "float16", "expected float64, float32, bfloat16 or float16, got ", name);
  return at::kHalf;
}

// In the order of Ledger::Kind.
constexpr const char* kKinds[] = {"allocation", "release",  "product",
                                  "attention",  "low rank", "launch"};
using Param = std::optional<std::pair<std::vector<int64_t>, std::string>>;
// Kind, name, slot or -1, sizes, and of a product the type of its operands.
using Event = std::tuple<const char*, const char*, int64_t, std::array<int64_t, 6>, const char*>;

// Of a device: whether it is a GPU, threads, multiprocessors, whether the FFN is cut, and of
// attention forward and backward on a GPU scratch and launches.
using Device = std::tuple<bool, int64_t, int64_t, bool, std::array<int64_t, 4>>;

// there: such a device, if there is one.
ckptfused::CountedDevice counted_device(const Device& device,
                                        const std::optional<std::string>& there) {
  const auto& [cuda, threads, multiprocessors, cut_ffn, attention] = device;
  ckptfused::CountedDevice counted{cuda,
                                   threads,
                                   multiprocessors,
                                   {},
                                   {attention[0], attention[1]},
                                   {attention[2], attention[3]},
                                   cut_ffn};
  if (there) counted.like = at::empty({0}, at::Device(*there));
  return counted;
}

// From the first on.
std::vector<Event> as_tuples(const std::vector<ckptfused::Ledger::Event>& events,
                             size_t first = 0) {
  std::vector<Event> result;
  for (size_t i = first; i < events.size(); ++i) {
    const ckptfused::Ledger::Event& e = events[i];
    result.emplace_back(kKinds[e.kind], e.name, e.slot, e.sizes, c10::toString(e.dtype));
  }
  return result;
}

// A ledger for whatever Python runs on meta tensors: a context manager of one thread.
class OpenLedger {
 public:
  OpenLedger(const Device& device, const std::optional<std::string>& there)
      : device_(counted_device(device, there)) {}
  void enter() { ledger_.emplace(device_); }
  void exit(const pybind11::args&) {
    events_ = ledger_->events();
    ledger_.reset();
  }
  // How many events there have been.
  size_t size() const { return ledger_ ? ledger_->events().size() : events_.size(); }
  std::vector<Event> events(size_t first) const {
    return as_tuples(ledger_ ? ledger_->events() : events_, first);
  }
  std::optional<int64_t> number_of(const at::Tensor& t) const {
    return ledger_ ? ledger_->number_of(t) : std::nullopt;
  }
  void op_ran(bool by_autograd) {
    if (ledger_) ledger_->op_ran(by_autograd);
  }
  void set_attention(std::array<int64_t, 4> a) {
    if (ledger_) ledger_->set_attention({a[0], a[1]}, {a[2], a[3]});
  }

 private:
  ckptfused::CountedDevice device_;
  std::optional<ckptfused::Ledger> ledger_;
  std::vector<ckptfused::Ledger::Event> events_;
};

// The events of a forward, or where needs is given of a backward.
std::vector<Event> count(const std::string& spec, std::vector<int64_t> sizes,
                         const std::string& dtype, const std::vector<Param>& params,
                         std::vector<int64_t> cu_seqlens, const std::vector<Param>& tables,
                         const Device& device, const std::optional<std::string>& there, bool save,
                         const std::optional<std::vector<bool>>& needs) {
  const auto as_counted = [](const std::vector<Param>& given) {
    std::vector<std::optional<ckptfused::CountedCall::Param>> made;
    for (const Param& p : given) {
      made.push_back(
          p ? std::optional(ckptfused::CountedCall::Param{p->first, dtype_named(p->second)})
            : std::nullopt);
    }
    return made;
  };
  const ckptfused::CountedCall call{spec,
                                    std::move(sizes),
                                    dtype_named(dtype),
                                    as_counted(params),
                                    std::move(cu_seqlens),
                                    as_counted(tables)};
  const ckptfused::CountedDevice counted = counted_device(device, there);
  return as_tuples(needs ? ckptfused::count_backward(call, counted, *needs)
                         : ckptfused::count_forward(call, counted, save));
}

// As attention_kernel: the kernel's name and the reason. gpu: compute capability, cuDNN's version.
std::pair<std::string, std::string> attention_choice(unsigned special, const std::string& dtype,
                                                     std::array<int64_t, 5> sizes,
                                                     std::array<int64_t, 3> gpu,
                                                     const std::string& wanted) {
  const auto [batch, heads, queries, keys, head_dim] = sizes;
  std::string reason;
  const ckptfused::AttentionKernel kernel = ckptfused::attention_kernel(
      {special, dtype_named(dtype), batch, heads, queries, keys, head_dim},
      {gpu[0], gpu[1], gpu[2]}, wanted, &reason);
  return {ckptfused::attention_kernel_name(kernel), reason};
}

// As attention_is_flash, for as many keys as queries: likewise.
std::pair<bool, std::string> flash_choice(unsigned special, const std::string& dtype,
                                          std::array<int64_t, 4> sizes) {
  const auto [batch, heads, length, head_dim] = sizes;
  std::string reason;
  const bool flash = ckptfused::attention_is_flash(
      {special, dtype_named(dtype), batch, heads, length, length, head_dim}, &reason);
  return {flash, reason};
}

std::pair<std::string, std::string> product_choice(const std::string& dtype) {
  std::string reason;
  const std::string kernel = ckptfused::product_kernel(dtype_named(dtype), &reason);
  return {kernel, reason};
}

// Address, Python's lists of hooks, (tensor, fill) of those made, how many are results, and of each
// launch function, grid, threads, shared memory, values and tensors.
void keep_launches(
    uintptr_t start, const std::vector<pybind11::list>& hooks,
    const std::vector<std::pair<at::Tensor, std::optional<double>>>& made, size_t results,
    const std::vector<std::tuple<uintptr_t, unsigned, unsigned, unsigned, std::vector<uint64_t>,
                                 std::vector<std::pair<size_t, size_t>>>>& launches) {
  ckptfused::LaunchRecord record;
  record.start = reinterpret_cast<ckptfused::LaunchKernel>(start);
  for (const pybind11::list& hook : hooks) {
    static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
    const auto* length = &reinterpret_cast<PyVarObject*>(hook.ptr())->ob_size;
    record.hooks.push_back(reinterpret_cast<const int64_t*>(length));
  }
  for (const auto& [t, fill] : made) {
    record.made.push_back({t.sizes().vec(), t.strides().vec(), t.scalar_type(), fill});
  }
  record.results = results;
  for (const auto& [function, grid, threads, shared, values, tensors] : launches) {
    record.launches.push_back(
        {reinterpret_cast<void*>(function), grid, threads, shared, values, tensors});
  }
  ckptfused::keep_launches(std::move(record));
}

// A Python context manager.
class UnderSettings {
 public:
  explicit UnderSettings(ckptfused::Settings settings) : settings_(std::move(settings)) {}
  void enter() { guard_.emplace(settings_); }
  void exit(const pybind11::args&) { guard_.reset(); }

 private:
  ckptfused::Settings settings_;
  std::optional<ckptfused::SettingsGuard> guard_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("version") = CKPTFUSED_VERSION;
  m.attr("torch_version") = CKPTFUSED_TORCH_VERSION;
  m.attr("cuda_architectures") = ckptfused::kCudaArchitectures;
  m.def("current_settings", &ckptfused::current_settings);
  pybind11::class_<UnderSettings>(m, "UnderSettings")
      .def(pybind11::init<ckptfused::Settings>())
      .def("__enter__", &UnderSettings::enter)
      .def("__exit__", &UnderSettings::exit);
  m.def("cpu_target", &ckptfused::cpu_target_name);
  m.def("forget_ffn_choices", &ckptfused::call::forget_ffn_choices);
  m.def("scratch_limit", &ckptfused::scratch_limit);
  m.def("ffn_tiles", [](int64_t rows, int64_t width, int64_t hidden, bool gated, int64_t size,
                        int64_t limit, bool cuda) {
    const ckptfused::FFNTiles t =
        ckptfused::ffn_tiles(rows, width, hidden, gated, size, limit, cuda);
    return std::make_tuple(t.rows, t.cols);
  });
  m.def("matmul_out", &ckptfused::matmul_out);
  m.def("mkl_is_slow", &ckptfused::mkl_is_slow);
  m.def("onednn_workspace", &ckptfused::onednn_workspace);
  m.def("flash_scratch_bytes", [](const std::string& dtype, int64_t kv_heads, int64_t queries,
                                  int64_t keys, int64_t head_dim, int64_t threads, bool backward) {
    return ckptfused::flash_scratch_bytes(dtype_named(dtype), kv_heads, queries, keys, head_dim,
                                          threads, backward);
  });
  m.def("runs_as_float",
        [](const std::string& dtype) { return ckptfused::runs_as_float(dtype_named(dtype)); });
  m.def("product_choice", &product_choice);
  m.def("flash_choice", &flash_choice);
  m.def("may_fuse_up", [](const std::string& spec, int64_t rows) {
    return ckptfused::may_fuse_up(ckptfused::parse_spec(spec)->ffn, rows);
  });
  m.def("residual_makes_next_norm", [](const std::string& spec) {
    return ckptfused::residual_makes_next_norm(*ckptfused::parse_spec(spec));
  });
  m.attr("attention_override") = std::string(ckptfused::attention_override());
  m.attr("attention_special") = std::vector<std::string>(std::begin(ckptfused::kAttentionSpecial),
                                                         std::end(ckptfused::kAttentionSpecial));
  m.attr("attention_least_scale") = ckptfused::kLeastScale;
  m.def("attention_choice", &attention_choice);
  m.def("flash_gpu_scratch", [](std::array<int64_t, 6> sizes, int64_t multiprocessors) {
    const auto [batch, heads, kv_heads, queries, keys, head_dim] = sizes;
    return ckptfused::flash_gpu_scratch({batch, heads, kv_heads, queries, keys, head_dim},
                                        multiprocessors);
  });
  m.def("launches_wanted", &ckptfused::launches_wanted);
  m.def("keep_launches", &keep_launches);
  m.def("count", &count);
  pybind11::class_<OpenLedger>(m, "OpenLedger")
      .def(pybind11::init<Device, std::optional<std::string>>())
      .def("__enter__", &OpenLedger::enter)
      .def("__exit__", &OpenLedger::exit)
      .def("__len__", &OpenLedger::size)
      .def("events", &OpenLedger::events, pybind11::arg("first") = 0)
      .def("number_of", &OpenLedger::number_of)
      .def("op_ran", &OpenLedger::op_ran)
      .def("set_attention", &OpenLedger::set_attention);
  bind_arguments(m);
  bind_byte_copies(m);
  bind_copy_on_write(m);
  bind_module_guard(m);
  bind_testing(m.def_submodule("testing"));
}
