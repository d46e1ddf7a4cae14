#pragma once

#include "block/block.h"

namespace ckptfused {

// While one lives that is to hold them, the weights that it meets are dequantized once; else for
// each product, and freed with it.
class Block::HeldWeights {
 public:
  HeldWeights(Block& block, bool hold) : block_(block), hold_(hold && !block.holds_weights_) {
    if (hold_) block_.holds_weights_ = true;
  }
  ~HeldWeights() {
    if (hold_) block_.release_weights();
  }
  HeldWeights(const HeldWeights&) = delete;
  HeldWeights& operator=(const HeldWeights&) = delete;

 private:
  Block& block_;
  bool hold_;
};

}  // namespace ckptfused
