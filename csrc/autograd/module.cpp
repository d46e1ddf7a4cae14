// Python module of the extension: importing it registers the ops. What is not an op is here.
#include "ops/torch.h"

#include <string>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd/count.h"
#include "autograd/settings.h"
#include "autograd/tiles.h"
#include "kernels/cpu/target.h"
#include "ops/cuda_build.h"
#include "ops/linear.h"

namespace {

at::ScalarType dtype_named(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  TORCH_CHECK(name == "float16", "expected float64, float32, bfloat16 or float16, got ", name);
  return at::kHalf;
}

// In the order of Ledger::Kind.
constexpr const char* kKinds[] = {"allocation", "release",  "product",
                                  "attention",  "low rank", "launch"};
using Param = std::optional<std::pair<std::vector<int64_t>, std::string>>;
// Kind, name, slot or -1, sizes, and of a product the type of its operands.
using Event = std::tuple<const char*, const char*, int64_t, std::array<int64_t, 5>, const char*>;

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
                         std::vector<int64_t> cu_seqlens, int64_t angle_copies,
                         const Device& device, const std::optional<std::string>& there, bool save,
                         const std::optional<std::vector<bool>>& needs) {
  ckptfused::CountedCall call{spec, std::move(sizes),      dtype_named(dtype),
                              {},   std::move(cu_seqlens), angle_copies};
  for (const Param& p : params) {
    call.params.push_back(
        p ? std::optional(ckptfused::CountedCall::Param{p->first, dtype_named(p->second)})
          : std::nullopt);
  }
  const ckptfused::CountedDevice counted = counted_device(device, there);
  return as_tuples(needs ? ckptfused::count_backward(call, counted, *needs)
                         : ckptfused::count_forward(call, counted, save));
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
  m.def("launch_error",
        [](const std::string& op, const std::string& status, const std::string& built_for,
           const std::string& gpu, int major, int minor) {
          return ckptfused::launch_error(op, status, built_for, {gpu, major, minor});
        });
  m.def("ffn_scratch_limit", &ckptfused::ffn_scratch_limit);
  m.def("ffn_tiles", [](int64_t rows, int64_t width, int64_t hidden, bool gated, int64_t size,
                        int64_t limit, bool cuda) {
    const ckptfused::FFNTiles t =
        ckptfused::ffn_tiles(rows, width, hidden, gated, size, limit, cuda);
    return std::make_tuple(t.rows, t.cols);
  });
  m.def("runs_as_float",
        [](const std::string& dtype) { return ckptfused::runs_as_float(dtype_named(dtype)); });
  m.def("count", &count);
  pybind11::class_<OpenLedger>(m, "OpenLedger")
      .def(pybind11::init<Device, std::optional<std::string>>())
      .def("__enter__", &OpenLedger::enter)
      .def("__exit__", &OpenLedger::exit)
      .def("__len__", &OpenLedger::size)
      .def("events", &OpenLedger::events, pybind11::arg("first") = 0)
      .def("number_of", &OpenLedger::number_of)
      .def("set_attention", &OpenLedger::set_attention);
}
