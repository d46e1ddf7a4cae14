"""A block call step by step, without data: the model of csrc/autograd/{block,attention,ffn}.cpp.

The methods have the names and the order of the C++ ones, so that what is allocated, freed and multiplied, and when,
can be read side by side. What a walk counts is in its `time` and its `work`.
"""

from __future__ import annotations

from math import prod

from ckptfused.cost_frame import Frame, runs_as_float
from ckptfused.cost_work import Attention

_QUERY_TILE = 128  # csrc/kernels/cpu/attention.h

Part = tuple[str, int]
Tile = tuple[int, int, int, int]


class AttentionWalk(Frame):
    """csrc/autograd/attention.cpp"""

    save = False
    qk_in_place = False

    @property
    def _qkv_parts(self) -> list[Part]:
        a = self.attn
        if a.joint:
            return [("attn.q", a.qkv_width)]
        return [("attn.q", a.q_width), ("attn.k", a.kv_width), ("attn.v", a.kv_width)]

    def _flash(self) -> bool:
        """Whether PyTorch's kernel is used (csrc/ops/attention_cpu.cpp)."""
        a = self.attn
        windowed = 0 < a.window < self.call.length
        plain = a.mask == a.padding == "none" and not (a.packed or windowed or a.softcap or round(a.p_attn * 65536))
        return plain and not (self.P.itemsize == 2 and runs_as_float(self.P))

    def _tiled_scratch(self, backward: bool, tasks: int, longest: int) -> int:
        from ckptfused import _C

        dtype = str(self.P).removeprefix("torch.")
        each = _C.attention_scratch_bytes(backward, dtype, longest, longest, self.attn.head_dim)
        return min(self.call.threads, tasks) * each

    def ensure_n1(self) -> None:
        if "n1" not in self.values:
            self.pre_norm("n1", "attn.pre", self.attn.pre, self.P)

    def ensure_qkv(self) -> None:
        if "qkv" in self.values and not self.qk_in_place:
            return
        self.ensure_n1()
        self.make("qkv", self.rows(self.attn.qkv_width, self.P))
        self.qk_in_place = False
        self.project("qkv", self.N, self.C, self._qkv_parts)
        if self.spec.parallel != "shared":
            self.drop("n1")

    def ensure_qk(self) -> None:
        if "qk" in self.values:
            return
        self.ensure_qkv()
        a = self.attn
        plain = a.qk_norm == a.rope == "none"
        raw_needed = "qkv" in self.spec.keep or (self.backward and a.qk_norm != "none")
        self.values.add("qk")
        if plain:
            return
        self.qk_in_place = not raw_needed
        if raw_needed:
            self.make("qk", self.rows(a.q_width + a.kv_width, self.P))
        if a.qk_norm != "none":
            for name in ("attn.q_norm", "attn.k_norm"):
                with self.gains((name, a.qk_norm, True), width=a.head_dim):
                    pass

    def ensure_attn(self) -> None:
        if "o" in self.values:
            return
        self.ensure_qk()
        a, call = self.attn, self.call
        self.work.append(Attention(call.batch, a.heads, call.length, a.head_dim))
        self.make("o", self.rows(a.q_width, self.P))
        self.make("lse", self.rows(a.heads, self.A))
        if self._flash():
            if a.heads > 1 and call.length > 1:  # PyTorch's is [B, T, H] in memory
                with self.time.temporary(self.rows(a.heads, self.A)):
                    pass
        else:
            lengths = call.lengths or (call.length,) * call.batch
            tasks = a.heads * sum(-(-length // _QUERY_TILE) for length in lengths)
            with self.time.temporary(self._tiled_scratch(False, tasks, max(lengths))):
                pass
        if not self.backward:
            self.drop("qk")
            if not (self.save and "qkv" in self.spec.keep):
                self.drop("qkv")

    def _o_rows(self) -> int:
        """Bytes of the copy that a sequence-first block makes of o."""
        return self.rows(self.attn.q_width, self.P) if self._copies_o() else 0

    def _copies_o(self) -> bool:
        return self.spec.seq_first and self.call.batch > 1 and self.call.length > 1 and not self._flash()

    def ensure_proj(self) -> None:
        if "proj" in self.values:
            return
        self.ensure_attn()
        self.make("proj", self.rows(self.C, self.P))
        with self.time.temporary(self._o_rows()):
            self.project("proj", self.N, self.attn.q_width, [("attn.o", self.C)])

    def attention_backward(self, ds: str) -> str | None:
        a = self.attn
        need_n1 = self.need("x", "attn.pre_w", "attn.pre_b")
        qkv_slots = [f"attn.{part}_{kind}" for part in ("q", "k", "v", "q_norm", "k_norm") for kind in "wb"]
        need_qkv = need_n1 or self.need(*qkv_slots)
        if not (need_qkv or self.need("attn.o_w", "attn.o_b", "attn.post_w", "attn.post_b")):
            return None

        if a.post != "none":
            self.ensure_proj()
        dproj = self.residual_backward("attn", ds)
        self.drop("proj")
        if need_qkv:
            self.time.alloc("d_o", self.rows(a.q_width, self.P))
        if need_qkv or self.need("attn.o_w"):
            self.ensure_attn()
        with self.time.temporary(self._o_rows() if "o" in self.values else 0):
            self.project_backward(self.N, a.q_width, [("attn.o", self.C)], self.P if need_qkv else None, False)
        if dproj != ds:
            self.time.free(dproj)
        if not need_qkv:
            return None

        self.ensure_qk()
        self._attention_bwd()
        self.time.free("d_o")
        self.drop("o", "lse", "qk")
        if a.qk_norm == "none":
            self.drop("qkv")

        self.time.alloc("dqkv", self.rows(a.qkv_width, self.P))
        for d, name, width in (("dq", "attn.q_norm", a.q_width), ("dk", "attn.k_norm", a.kv_width)):
            count = self.vector_grads(f"{name}_w", f"{name}_b")
            if a.qk_norm != "none":
                with self.gains((name, a.qk_norm, False), width=a.head_dim), self.partials(self.N, a.head_dim, count):
                    pass
            self.time.free(d)
        self.drop("qkv")
        self.time.free("dv")

        if need_n1:
            self.time.alloc("dn1", self.rows(self.C, self.P))
        if self.need(*qkv_slots[:6]):
            self.ensure_n1()
        self.project_backward(self.N, self.C, self._qkv_parts, self.P if need_n1 else None, False)
        self.drop("n1")
        self.time.free("dqkv")
        return "dn1" if need_n1 else None

    def _attention_bwd(self) -> None:
        a, call = self.attn, self.call
        self.work.append(Attention(call.batch, a.heads, call.length, a.head_dim, "attention backward"))
        for name, width in (("dq", a.q_width), ("dk", a.kv_width), ("dv", a.kv_width)):
            self.time.alloc(name, self.rows(width, self.P))
        if not self._flash():
            lengths = call.lengths or (call.length,) * call.batch
            scratch = self._tiled_scratch(True, len(lengths) * a.kv_heads, max(lengths))
            with self.time.temporary(scratch):
                pass


class FFNWalk(AttentionWalk):
    """csrc/autograd/ffn.cpp"""

    replayed_gu = False

    @property
    def _cut_cols(self) -> bool:
        return self.tile_cols < self.ffn.hidden

    def _tiles(self) -> list[Tile]:
        hidden = self.ffn.hidden
        return [
            (row, min(self.tile_rows, self.N - row), col, min(self.tile_cols, hidden - col))
            for row in range(0, self.N, self.tile_rows)
            for col in range(0, hidden, self.tile_cols)
        ]

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

    def ensure_n2(self) -> None:
        raise NotImplementedError

    def ensure_down(self) -> None:
        if "down" in self.values:
            return
        hidden, down = self.ffn.hidden, [("ffn.down", self.C)]
        tiles = self._tiles()
        if self._cut_cols:
            self.time.alloc("h", self.rows(hidden, self.P))
        for tile in tiles:
            _, rows, _, _ = tile
            gu = self.make_gu(tile)
            if not self.backward and tile == tiles[-1]:
                self.drop("n1", "n2")
            if not self._cut_cols:
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
        need_gate_up = self.need("ffn.gate_w", "ffn.gate_b", "ffn.up_w", "ffn.up_b")
        need_gu, need_h = need_n2 or need_gate_up, self.need("ffn.down_w")
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
        row, rows, _, cols = tile
        need_gu, dn2_type = need_n2 or need_gate_up, self.A if self._cut_cols else self.P
        gu = self.make_gu(tile)
        self.time.alloc("h", rows * cols * self.P.itemsize)
        if need_gu:
            self.weight("ffn.down_w")
            self.product("d h", rows, cols, self.C)
            gu = gu or self.time.alloc("gu tile", self._gu_bytes(rows, cols))
        else:
            self.time.free(gu)
        if need_h:
            self.weight_grad("ffn.down_w", rows, self.C, cols)
        self.time.free("h")
        if not need_gu:
            return
        if need_gate_up:
            self.ensure_n2()
        if need_n2 and "dn2" not in self.time:
            self.time.alloc("dn2", self.rows(self.C, dn2_type))
        self.project_backward(rows, self.C, self._gu_parts(cols), dn2_type if need_n2 else None, row > 0)
        self.time.free(gu)


class BlockWalk(FFNWalk):
    """csrc/autograd/block.cpp"""

    @property
    def _serial(self) -> bool:
        return not self.spec.parallel

    def ensure_mid(self) -> None:
        if "mid" in self.values:
            return
        self.ensure_proj()
        a, keep = self.attn, self.spec.keep
        ffn_follows = self.spec.ffn is not None and self._serial
        closing = a.out != "none"
        if closing:
            fuse_next = not self.backward or ffn_follows
        else:
            fuse_next = ffn_follows and self.ffn.pre != "none"
        following = ("attn.out", a.out) if closing else ("ffn.pre", self.ffn.pre) if ffn_follows else ("", "none")
        if self.backward or not closing or "mid" in keep:
            self.make("mid", self.rows(self.C, self.R))
        if fuse_next:
            self.make("ffn_in" if closing else "n2", self.rows(self.C, self.R if closing else self.P))
        self.close("attn", following if fuse_next else None)
        if not ((self.backward and a.post != "none") or (self.save and "proj" in keep)):
            self.drop("proj")
        if not self.backward and not (self.save and "attn" in keep):
            self.drop("o", "lse")

    def ensure_ffn_in(self) -> None:
        if "ffn_in" in self.values:
            return
        if self.spec.attn is None or not self._serial:
            self.values.add("ffn_in")
            return
        self.ensure_mid()
        if "ffn_in" not in self.values:
            self.pre_norm("ffn_in", "attn.out", self.attn.out, self.R)

    def ensure_n2(self) -> None:
        if "n2" in self.values:
            return
        if self.spec.parallel == "shared":
            self.ensure_n1()
            self.values.add("n2")
            return
        self.ensure_ffn_in()
        if "n2" not in self.values:
            self.pre_norm("n2", "ffn.pre", self.ffn.pre, self.P)

    def ensure_out(self) -> None:
        if "out" in self.values:
            return
        self.ensure_ffn_in()
        self.ensure_down()
        self.make("out", self.rows(self.C, self.R))
        self.close("ffn", None)
        if self.ffn.post == "none":
            self.drop("down")

    def forward(self, save: bool) -> None:
        self.save = save
        if self.spec.attn is not None:
            self.ensure_mid()
        if self.spec.ffn is None:
            return
        f, keep = self.ffn, self.spec.keep
        if save and "gu" in keep:
            self.make("gu", self._gu_bytes(self.N, f.hidden))
        self.ensure_ffn_in()
        self.ensure_down()
        self.drop("n1", "n2")
        self.time.alloc("y", self.rows(self.C, self.R))
        if save and "out" in keep and f.out != "none":
            self.make("out", self.rows(self.C, self.R))
        self.close("ffn", ("ffn.out", f.out) if f.out != "none" else None)

    def run_backward(self) -> None:
        names = {"attn": ("o", "lse"), "out": ("out" if self.spec.ffn and self.ffn.out != "none" else "down",)}
        for kept in self.spec.keep:
            self.values.update(names.get(kept, (kept,)))
        ds, dx, shared = self._ffn_part()
        attn_any = self.spec.attn is not None and self.need_half("attn.")
        if attn_any or (self.spec.attn is not None and self.need("x")):
            if ds is not None:
                dx, ds = self._attention_part(ds, dx, shared)
        elif self._serial:
            dx = ds
        if ds != dx:
            self.time.free(ds)
        self.drop(*self.values)
        self.time.free(*(f"{name} cast" for name in self.cast))
        self._results(dx)

    def _ffn_part(self) -> tuple[str | None, str | None, str | None]:
        """Gradients of the stream below the FFN half, of x by way of it alone, and of the shared norm's output."""
        if self.spec.ffn is None:
            return "dy", None, None
        f, ds, owned = self.ffn, "dy", False
        attn_any = self.spec.attn is not None and self.need_half("attn.")
        flows = self.need("x") or (self._serial and attn_any)
        pre = "attn.pre" if self.spec.parallel == "shared" else "ffn.pre"
        need_n2 = flows or self.need(f"{pre}_w", f"{pre}_b")
        below: str | None = ds
        if f.out != "none":
            self.ensure_out()
            above = ("ffn.out_w", "ffn.out_b")
            need_sum = flows or any(n.startswith("ffn.") and n not in above for n in self.needs)
            below, owned = self.norm_backward("d out", "dy", "ffn.out", f.out, None, False, need_sum), True
            self.drop("out")
        dn2 = self.ffn_backward(below, need_n2) if below is not None else None
        self.drop("gu")
        if self.replayed_gu:
            self.time.free("gu tile")
        if self.spec.parallel == "shared":
            self.drop("n2", "ffn_in")
            return "dy", None, dn2
        dx = None
        if dn2 is not None:
            self.ensure_ffn_in()
            self.drop("n2")
            made = self.norm_backward("d ffn_in", dn2, pre, f.pre, below, owned and self._serial, flows)
            if self._serial:
                if made != below:
                    self.time.free(below)
                below = made
            else:
                dx = made
        self.drop("n2", "ffn_in")
        self.time.free(dn2)
        if self._serial and not flows:
            self.time.free(below)
            below = None
        return below, dx, None

    def _attention_part(self, ds: str, dx: str | None, shared: str | None) -> tuple[str | None, str | None]:
        a, below = self.attn, ds
        owned = ds != "dy"
        if a.out != "none":
            self.ensure_mid()
            need_sum = self.need("x") or any(
                n.startswith("attn.") and not n.startswith("attn.out_") for n in self.needs
            )
            made = self.norm_backward("d mid", ds, "attn.out", a.out, None, False, need_sum)
            self.time.free(ds)
            if made is None:
                self.drop("mid")
                return None, None
            below, owned = made, True
        self.drop("mid")
        dn1 = self.attention_backward(below)
        if dn1 is None:
            dn1, shared = shared, None
        elif shared is not None:
            self.time.free(shared)
        branch = dx is not None
        result = self.norm_backward(
            "d x", dn1, "attn.pre", a.pre, dx if branch else below, branch or (owned and self._serial), self.need("x")
        )
        self.time.free(dn1)
        return result, below

    def _results(self, dx: str | None) -> None:
        if self.need("x") and dx == "dy":
            self.time.alloc("d x", self.rows(self.C, self.R))
        for name in self.shapes:
            if name not in self.needs:
                continue
            made, wanted = self.grads.get(name), self.params[name]
            if made != wanted:
                self.time.alloc(f"d {name} out", prod(self.shapes[name]) * wanted.itemsize)
                self.time.free(f"d {name}")
