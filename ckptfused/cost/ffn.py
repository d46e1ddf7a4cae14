"""The FFN half of a walk through a block call, tile by tile: the model of csrc/autograd/ffn.cpp."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ckptfused.cost.project import Projections
from ckptfused.cost.work import Product, compute_type
from ckptfused.spec import BlockSpec

Part = tuple[str, int]  # slot, width
Tile = tuple[int, int, int, int]  # first row, rows, first column, columns


def cut(rows: int, hidden: int, step: tuple[int, int]) -> list[Tile]:
    """The tiles of a call, in order (Block::tiles)."""
    if rows == 0:
        return [(0, 0, 0, hidden)]
    return [
        (row, min(step[0], rows - row), col, min(step[1], hidden - col))
        for row in range(0, rows, step[0])
        for col in range(0, hidden, step[1])
    ]


def takes_activation_along(
    spec: BlockSpec, batch: int, length: int, width: int, dtype: torch.dtype, device: str
) -> bool:
    """Whether one kernel makes the gate and up products and their activation (Block::choose_up_kernel).

    The op that the block asks says so, for the current GPU; without a GPU it is the platform's products.
    """
    f, compute, n = spec.ffn, compute_type(spec, dtype), batch * length
    if f is None or f.post != "none" or f.out != "none" or f.lora or n == 0:
        return False
    if compute not in (torch.bfloat16, torch.float16):
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key("ckptfused::ffn_choice", device.upper()):
        return False
    if device == "cuda" and not torch.cuda.is_available():
        return False
    like = torch.empty(0, device=device)
    return torch.ops.ckptfused.ffn_choice(like, compute, n, width, f.hidden, f.act) != "cublas"


class FFNWalk(Projections, ABC):
    """From n2 to down, and back."""

    replayed_gu = False

    @property
    def _cut_cols(self) -> bool:
        return self.tile_cols < self.ffn.hidden

    def _tiles(self) -> list[Tile]:
        return cut(self.N, self.ffn.hidden, (self.tile_rows, self.tile_cols))

    def _gu_bytes(self, rows: int, cols: int) -> int:
        return rows * cols * (2 if self.ffn.gated else 1) * self.P.itemsize

    def _gu_parts(self, cols: int) -> list[Part]:
        if not self.ffn.gated:
            return [("ffn.up", cols)]
        if not self.ffn.joint:
            return [("ffn.gate", cols), ("ffn.up", cols)]
        return [("ffn.gate", 2 * cols)] if cols == self.ffn.hidden else [("ffn.gate", cols)] * 2

    def make_gu(self, tile: Tile) -> str | None:
        """The buffer of a tile of gu; None: a view of the kept values."""
        _, rows, _, cols = tile
        if self.backward and "gu" in self.values:
            return None
        if self.replayed_gu:
            self.replayed_gu = False
            return "gu tile"
        self.ensure_n2()
        buffer = None
        if "gu" not in self.values or cols < self.ffn.hidden:
            buffer = self.time.alloc("gu tile", self._gu_bytes(rows, cols))
        self.project("gu", rows, self.C, self._gu_parts(cols))
        return buffer

    @abstractmethod
    def ensure_n2(self) -> None: ...

    def _up_kernel(self, tile: Tile, backward: bool) -> None:
        """What one kernel multiplies, and the weights in its type; it has no scratch."""
        _, rows, _, cols = tile
        if not (backward and "gu" in self.values):
            for slot, width in self._gu_parts(cols):
                self.weight(f"{slot}_w")
                self.weight(f"{slot}_b")
                self.work.append(Product("gu", rows, width, self.C))
        if backward:
            self.weight("ffn.down_w")
            self.work.append(Product("d h", rows, cols, self.C))

    def ensure_down(self) -> None:
        if "down" in self.values:
            return
        hidden, down = self.ffn.hidden, [("ffn.down", self.C)]
        tiles = self._tiles()
        if self._cut_cols:
            self.time.alloc("h", self.rows(hidden, self.P))
        for tile in tiles:
            _, rows, _, _ = tile
            gu = None
            if self.call.one_kernel:
                self.ensure_n2()
                if not self._cut_cols:
                    self.time.alloc("h", rows * hidden * self.P.itemsize)
                self._up_kernel(tile, backward=False)
            else:
                gu = self.make_gu(tile)
            if not self.backward and tile == tiles[-1]:
                self.drop("n1", "n2")
            if not self._cut_cols and not self.call.one_kernel:
                self.time.alloc("h", rows * hidden * self.P.itemsize)
            if self.backward and len(tiles) == 1:
                self.replayed_gu = gu is not None
            else:
                self.time.free(gu)
            if self._cut_cols:
                continue
            if "down" not in self.values:
                self.make("down", self.rows(self.C, self.P))
            self.project("down", rows, hidden, down)
            self.time.free("h")
        if self._cut_cols:
            self.make("down", self.rows(self.C, self.P))
            self.project("down", self.N, hidden, down)
            self.time.free("h")

    def ffn_backward(self, ds: str, need_n2: bool) -> str | None:
        f = self.ffn
        need_gate_up = self.need_any("ffn.gate_w", "ffn.gate_b", "ffn.up_w", "ffn.up_b")
        need_gu, need_h = need_n2 or need_gate_up, self.need_any("ffn.down_w")
        if not (need_gu or need_h or self.need("ffn.down_b", "ffn.post_w", "ffn.post_b")):
            return None
        if f.post != "none":
            self.ensure_down()
        ddown = self.residual_backward("ffn", ds)
        self.drop("down")
        self.bias_grad("ffn.down_b", self.C, False)
        if need_gu or need_h:
            for tile in self._tiles():
                self._tile_backward(tile, need_n2, need_gate_up, need_h)
        if "dn2" in self.time and self._cut_cols and self.A != self.P:
            self.time.alloc("dn2 rounded", self.rows(self.C, self.P))
            self.time.free("dn2")
            self.time.rename("dn2 rounded", "dn2")
        if ddown != ds:
            self.time.free(ddown)
        return "dn2" if need_n2 else None

    def _tile_backward(self, tile: Tile, need_n2: bool, need_gate_up: bool, need_h: bool) -> None:
        row, rows, col, cols = tile
        need_gu, dn2_type = need_n2 or need_gate_up, self.A if self._cut_cols else self.P
        if self.call.one_kernel:
            if "gu" not in self.values:
                self.ensure_n2()
            if need_h:
                self.time.alloc("h", rows * cols * self.P.itemsize)
            gu = self.time.alloc("gu tile", self._gu_bytes(rows, cols)) if need_gu else None
            self._up_kernel(tile, backward=True)
        else:
            gu = self._pointwise_backward(tile, need_gu)
        if need_h:
            self.weight_grad("ffn.down_w", rows, self.C, cols)
            self.adapters_backward("ffn.down", rows, cols, self.C, True, False, first=col == 0)
        self.time.free("h")
        if not need_gu:
            return
        if need_gate_up:
            self.ensure_n2()
        if need_n2 and "dn2" not in self.time:
            self.time.alloc("dn2", self.rows(self.C, dn2_type))
        self.project_backward(rows, self.C, self._gu_parts(cols), dn2_type if need_n2 else None, row > 0)
        self.time.free(gu)

    def _pointwise_backward(self, tile: Tile, need_gu: bool) -> str | None:
        """h and, where needed, dgu, whose buffer it returns."""
        _, rows, _, cols = tile
        gu = self.make_gu(tile)
        self.time.alloc("h", rows * cols * self.P.itemsize)
        if need_gu:
            self.weight("ffn.down_w")
            self.product("d h", rows, cols, self.C)
            self.adapters_backward("ffn.down", rows, cols, self.C, False, True)
            gu = gu or self.time.alloc("gu tile", self._gu_bytes(rows, cols))
        else:
            self.time.free(gu)
        return gu
