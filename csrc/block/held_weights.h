#pragma once

#include "block/block.h"

namespace ckptfused {

// While one lives over tiles, the weights from slot `first` on are dequantized once, where the
// numbers of all of them are within the limit of scratch; else, and others, for each product.
class Block::HeldWeights {
 public:
  HeldWeights(Block& block, bool tiles, int first) : block_(block), before_(block.held_from_) {
    if (tiles && first < before_ && block.numbers_fit(first)) block_.held_from_ = first;
  }
  ~HeldWeights() {
    block_.held_from_ = before_;
    for (const QuantizedSlots& stored : block_.quantized_) {
      if (stored.weight < before_) block_.cast_[stored.weight].reset();
    }
  }
  HeldWeights(const HeldWeights&) = delete;
  HeldWeights& operator=(const HeldWeights&) = delete;

 private:
  Block& block_;
  int before_;
};

}  // namespace ckptfused
