#pragma once

#include "block/block.h"

namespace ckptfused {

// While one lives over tiles, the weights from slot `first` on are dequantized once, where the
// numbers of all of them are within the limit of scratch; else for each product, and freed with it.
class Block::HeldWeights {
 public:
  HeldWeights(Block& block, bool tiles, int first)
      : block_(block), hold_(tiles && !block.holds_weights_ && block.numbers_fit(first)) {
    if (hold_) block_.holds_weights_ = true;
  }
  ~HeldWeights() {
    if (!hold_) return;
    block_.holds_weights_ = false;
    for (const QuantizedSlots& stored : block_.quantized_) block_.cast_[stored.weight].reset();
  }
  HeldWeights(const HeldWeights&) = delete;
  HeldWeights& operator=(const HeldWeights&) = delete;

 private:
  Block& block_;
  bool hold_;
};

}  // namespace ckptfused
