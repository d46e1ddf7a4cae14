#pragma once

#include "ops/torch.h"

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "block/spec_fields.h"

namespace ckptfused {

// The tensors of a call, in this order.
enum ExpertsSlot : int {
  kExpertsX,
  kExpertsWeights,
  kExpertsUp,
  kExpertsUpBias,
  kExpertsDown,
  kExpertsDownBias,
  kExpertsUpA,  // of LoRA on the first product; B comes next
  kExpertsUpB,
  kExpertsDownA,
  kExpertsDownB,
  kExpertsGrads,                    // slots before it may have a gradient
  kExpertsUpState = kExpertsGrads,  // what is beside weights in few bits: see QuantParam
  kExpertsDownState = kExpertsUpState + kQuantParams,
  kExpertsSlots = kExpertsDownState + kQuantParams
};

// What experts compute beside their products (ckptfused/spec/experts.py makes the text).
struct ExpertsSpec {
  std::string act;                          // of kActivations, or "clamped"
  bool interleaved = false,                 // gate and up alternate, not one behind the other
      transposed = false;                   // weights are [E, in, out]
  double limit = 0, alpha = 1, offset = 0;  // of "clamped"
  double up_scale = 1, down_scale = 1;      // of adapters
  double up_p = 0, down_p = 0;              // of dropout on what adapters are given
  std::vector<QuantizedSpec> quant;         // stacks in few bits, codes [E, bytes]
  at::ScalarType compute = at::ScalarType::Undefined;  // of the products; x's if undefined
  bool gated() const;
  // How the weights of a slot are stored; empty where they are numbers.
  std::string_view form(int slot) const;
};
ExpertsSpec parse_experts_spec(const std::string& text);

// The tensors of a call, in the order of ExpertsSlot, and which experts each token goes to.
struct ExpertsTensors {
  std::vector<at::Tensor> slots;  // undefined where absent
  at::Tensor ids;                 // [N, k], integers
  at::Tensor rng;                 // int64[2], where adapters have dropout
};

// The first slot of what is beside the codes of a slot's weights: see QuantParam.
int experts_state(int weight);

// A copy of ids as they are kept for backward: in one byte where that holds all of them, else in
// two.
at::Tensor narrow_ids(const at::Tensor& ids, int64_t experts);

// t as an operand beside wider ones: half precision is copied by a CPU if not here, where no ledger
// sees it.
at::Tensor beside_wide(const at::Tensor& t, at::ScalarType wide);

// A call of the experts of a mixture: y[n] = sum over j of weights[n, j] * expert[ids[n, j]](x[n]).
class Experts {
 public:
  // needs: of backward, which gradients are asked for.
  Experts(const ExpertsSpec& spec, const ExpertsTensors& tensors, std::vector<bool> needs = {});

  at::Tensor forward();
  // Replays the products that make gate and up, and no other.
  std::vector<at::Tensor> backward(const at::Tensor& dy);

 private:
  // Rows of one expert: all, or a part of them. On a GPU all of several, which a grouped product
  // takes at once.
  struct Group {
    int64_t expert, first, count;
    bool begins = true, ends = true;  // the expert's rows
    int64_t experts = 1;
    at::Tensor bounds = {};  // of several: int32, where each one's rows end
    bool single() const { return experts == 1; }
  };
  // Gate and up side by side, [n, 2I] ([n, I] without a gate), and its parts with rows in a row.
  struct Hidden {
    at::Tensor both, gate, up;
  };

  void check() const;
  void sort_rows();
  void add_groups(int64_t expert, int64_t first, int64_t end, int64_t most);
  // How many experts a grouped product may take at once; 0: there are none.
  int64_t most_grouped() const;
  // Groups of several experts; of one that has more rows than go at once, groups of `most` of them.
  // first: where each one's rows begin; bounds: likewise, int64 on the device.
  void add_grouped(const std::vector<int64_t>& first, const at::Tensor& bounds, int64_t most,
                   int64_t experts);
  const at::Tensor& slot(int i) const { return tensors_.slots[i]; }
  bool need(int i) const { return !needs_.empty() && needs_.at(i) && slot(i).defined(); }
  // Of a group: of one expert a matrix, of several a stack.
  at::Tensor weight(int i, const Group& group);
  // Of one expert's matrix, whatever the slot and however it is stored.
  std::array<int64_t, 2> matrix_sizes(int i) const;
  at::Tensor dequantized(int i, const Group& group) const;
  // What it adds to each row: of several experts, rows.
  at::Tensor bias(int i, const Group& group) const;
  // out (+)= in @ weight^T, or, `back`, in @ weight: each row by its expert's.
  void multiply(int i, const at::Tensor& out, const at::Tensor& in, const Group& group, bool back,
                bool add);
  at::Tensor rows_of(const at::Tensor& t, const Group& group) const;
  at::Tensor scores(const Group& group) const;
  Hidden split(const at::Tensor& both) const;
  Hidden hidden(const at::Tensor& x, const Group& group);
  // Of an adapter, kExpertsUpA or kExpertsDownA: with which probability its dropout drops.
  double dropout(int a) const { return a == kExpertsUpA ? spec_.up_p : spec_.down_p; }
  // out = dropout of a group's rows, which out may be.
  void drop(int a, const at::Tensor& out, const at::Tensor& rows, const Group& group) const;
  // Likewise in a copy, or the rows themselves where nothing is dropped.
  at::Tensor dropped(int a, const at::Tensor& rows, const Group& group) const;
  // dropped A^T by an adapter's scale, [n, r].
  at::Tensor low_rank(int a, const at::Tensor& dropped, const Group& group);
  // out += drop(in) A^T B^T by an adapter's scale, where there is one.
  void add_adapter(int a, const at::Tensor& in, const Group& group, const at::Tensor& out);
  // Adds to din (where defined) what comes through an adapter, and to its own gradients where these
  // are asked for.
  void adapter_backward(int a, const at::Tensor& in, const at::Tensor& dout, const Group& group,
                        const at::Tensor& din);
  // Before an expert's first group: where its gradients are summed, those of weights without
  // values.
  void begin_sums(const Group& group);
  // What this group adds to the gradient of a slot, of its expert: a product, or the sum of rows.
  void add_product(int i, const at::Tensor& a, const at::Tensor& b, const Group& group);
  void add_rows(int i, const at::Tensor& rows, const Group& group);
  // After an expert's last group: its gradients, in the type of their slots, and no numbers of it.
  void finish(const Group& group);
  at::Tensor activated(const Hidden& hidden) const;
  // Writes h (where defined) and returns the gradient of hidden.both.
  at::Tensor activation_gradient(const Hidden& hidden, const at::Tensor& dh) const;
  at::Tensor combined(const at::Tensor& sorted) const;
  at::Tensor empty(at::IntArrayRef size, at::ScalarType type) const {
    return at::empty(size, slot(kExpertsX).options().dtype(type));
  }

  const ExpertsSpec& spec_;
  const ExpertsTensors& tensors_;
  const std::vector<bool> needs_;
  int64_t N_, C_, k_, E_, I_;
  at::ScalarType P_, A_;  // compute, accumulation
  at::Tensor order_;      // [N * k] sorted by expert: which (token, choice)
  at::Tensor token_;      // [N * k] sorted by expert: which token
  at::Tensor expert_;     // [N * k] sorted: which expert, where groups of several have biases
  // [k, N] the inverse of order_, a choice's places side by side: index_select copies others.
  at::Tensor place_;
  at::Tensor up_numbers_;          // of a group's weights in few bits
  std::vector<Group> groups_;      // of experts with rows
  std::vector<int64_t> idle_;      // experts without
  std::vector<at::Tensor> grads_;  // of the slots, where asked for
  std::vector<at::Tensor> sums_;   // of one expert: its part of these, or what is rounded to it
};

}  // namespace ckptfused
