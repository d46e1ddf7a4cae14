"""A block call step by step, without data: the model of csrc/autograd/block.cpp.

The methods here and in `attention`, `ffn` and `frame` have the names and the order of the C++ ones, so
that what is allocated, freed and multiplied, and when, can be read side by side. What a walk counts is in its `time`
and its `work`.
"""

from __future__ import annotations

from math import prod

from ckptfused.cost.attention import AttentionWalk
from ckptfused.cost.ffn import FFNWalk


class BlockWalk(AttentionWalk, FFNWalk):
    """The residual stream, and a whole forward or backward."""

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
        if self.backward or not closing or "mid" in keep:
            self.make("mid", self.rows(self.C, self.R))
        if fuse_next:
            self.make("ffn_in" if closing else "n2", self.rows(self.C, self.R if closing else self.P))
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
            self.pre_norm("ffn_in", self.attn.out, self.R)

    def ensure_n2(self) -> None:
        if "n2" in self.values:
            return
        if self.spec.parallel == "shared":
            self.ensure_n1()
            self.values.add("n2")
            return
        self.ensure_ffn_in()
        if "n2" not in self.values:
            self.pre_norm("n2", self.ffn.pre, self.P)

    def ensure_out(self) -> None:
        if "out" in self.values:
            return
        self.ensure_ffn_in()
        self.ensure_down()
        self.make("out", self.rows(self.C, self.R))
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
