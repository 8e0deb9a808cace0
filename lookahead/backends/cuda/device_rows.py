"""Stages of rows of a program as Triton kernels. In: a stage of a plan (plan.py). Out: a kernel's source, and what it is given.

A program of the kernel works on one token. Buffers that only this stage uses have no memory: what an instruction reads from
them is computed where it is read, in registers, and a value that several instructions read is computed once. So a norm reads
its input once. Only results that other stages read, keys and values, and sums that are many are written.

Where no instruction waits for what another one writes or adds up, several programs share a token's numbers, CHUNK each.
Nothing in a kernel depends on other tokens, and no sum on how many there are, so a token gets the same bits next to any other
tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
from collections.abc import Callable
from typing import Any

import torch

from lookahead.backends.lowering import ops
from lookahead.backends.lowering.plan import Buffer, Instruction, Product, Stage, Unsupported, View, reads, written
from lookahead.forward import tree_meta

# What instructions are in Triton's language: see program_kernel.py for what they do
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ROUNDED = {ops.NOT: "{}", ops.TO_BFLOAT16: "{}.to(tl.bfloat16).to(tl.float32)"}
ROUNDED[ops.TO_FLOAT16] = "{}.to(tl.float16).to(tl.float32)"
CODE = {
    ops.ADD: "({} + {})",
    ops.SUBTRACT: "({} - {})",
    ops.MULTIPLY: "({} * {})",
    ops.DIVIDE: "({} / {})",
    ops.COPY: "{}",
    ops.STORE: "{}",
    ops.NEGATE: "(-{})",
    ops.SQUARE_ROOT: "tl.sqrt({})",
    ops.COSINE: "tl.cos({})",
    ops.SINE: "tl.sin({})",
    ops.EXP: "tl.exp({})",
    ops.SIGMOID: "(1.0 / (1.0 + tl.exp(-{0})))",
    ops.SILU: "({0} / (1.0 + tl.exp(-{0})))",
    ops.TANH: "(1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))",
    ops.ERF: "tl.erf({})",
    ops.GELU: "(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    ops.GELU_TANH: "({0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))))",
    ops.RELU: "tl.maximum({}, 0.0)",
}
CHUNK = 1024  # numbers of a token that a program works on at once, where several share it
MOST_AT_ONCE = 8192  # numbers that one program works on at once
NUMBERS_PER_WARP = 256  # of those
IDS, POSITIONS, META, KEPT, SCORES = "ids", "positions", "meta", "kept", "scores"


@dataclasses.dataclass(frozen=True)
class Slotted:
    """Keys or values of a layer, as slots hold them; the number of a plan's `placed`."""

    number: int


Argument = Buffer | torch.Tensor | Slotted | str  # what a kernel is given the address of
# Strides that follow an address.
BEHIND: dict[Any, tuple[str, ...]] = {Slotted: ("_slot", "_head", "_position"), META: ("_line",)}


@dataclasses.dataclass
class RowKernel:
    """source: of a function `rows`. given: what it is given, in its order, each with the strides of BEHIND. pieces: programs
    that share a token. warps: of a program.
    """

    source: str
    given: list[Argument]
    pieces: int
    warps: int

    def compiled(self) -> Any:
        """The kernel, for Triton to launch. The same source gives the same kernel."""
        if self.source not in _compiled:
            import triton

            name = f"<lookahead rows {len(_compiled)}>"
            linecache.cache[name] = len(self.source), None, self.source.splitlines(keepends=True), name
            namespace: dict[str, Any] = {"triton": triton, "tl": triton.language, "__name__": __name__}
            exec(compile(self.source, name, "exec"), namespace)
            _compiled[self.source] = triton.jit(namespace["rows"])
        return _compiled[self.source]


_compiled: dict[str, Any] = {}


def row_kernel(stage: Stage, products: dict[Buffer, Product], in_parts: bool, vocab: int, scores: torch.dtype) -> RowKernel:
    """The kernel of a stage of instructions. products: what fills each buffer that products fill: with partial sums in float32,
    or else with what it gives. vocab, scores: numbers of a line of scores, and their dtype. Raises Unsupported.
    """
    return _Writer(stage, products, in_parts, vocab, NAMES[scores]).kernel()


def size_in(home: Buffer, products: dict[Buffer, Product], in_parts: bool) -> int:
    """Bytes of a number of a buffer."""
    return products[home].weight.weight.element_size() if home in products and not in_parts else home.size


def must_be_written(stages: list[Stage]) -> set[Buffer]:
    """Buffers that have memory although one stage alone uses them: sums that are many."""
    steps = [step for stage in stages for step in stage.steps if isinstance(step, Instruction)]
    return {_home(step) for step in steps if step.op == ops.SUM and step.outer > 1}


def _home(step: Instruction) -> Buffer:
    assert step.target is not None
    assert isinstance(step.target[0].home, Buffer)
    return step.target[0].home


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _plus(text: str, number: int) -> str:
    return text if not number else f"{text} + {number}" if text != "0" else str(number)


class _Writer:
    """Writes one kernel."""

    def __init__(self, stage: Stage, products: dict[Buffer, Product], in_parts: bool, vocab: int, scores: str):
        self.stage, self.products, self.in_parts, self.vocab, self.scores = stage, products, in_parts, vocab, scores
        self.steps: list[Instruction] = stage.steps
        self.lines: list[str] = []
        self.given: list[Argument] = []
        self.known: dict[tuple[Any, ...], str] = {}  # what is in registers
        self.sums: dict[Buffer, str] = {}  # single ones
        self.waits: set[Buffer] = set()  # written, but perhaps not by all threads yet
        self.indent = "    "
        self.names = 0
        self.most = 1  # numbers that are worked on at once
        self.writers: dict[Buffer, list[Instruction]] = {}
        for step in self.steps:
            if step.target is not None and (home := written(step)) is not None:
                self.writers.setdefault(home, []).append(step)

    # ---- the whole

    def kernel(self) -> RowKernel:
        stored = [step for step in self.steps if self._is_stored(step)]
        pieces = 1
        if not any(step.op == ops.SUM for step in self.steps) and not self._reads_what_it_writes(stored):
            pieces = self._in_pieces(stored)
        else:
            for step in self.steps:
                if step.op == ops.SUM:
                    self._sum(step)
                elif self._is_stored(step):
                    self._whole(step)
        strides = [BEHIND.get(given if isinstance(given, str) else type(given), ()) for given in self.given]
        names = [f"p{number}{behind}" for number, each in enumerate(strides) for behind in ("", *each)]
        head = ["import triton", "import triton.language as tl", "", "", f"def rows({', '.join(names)}):"]
        begin = ["    row = tl.program_id(0).to(tl.int64)"]
        begin.append(f"    token = tl.load(p{self.given.index(KEPT)} + row)" if KEPT in self.given else "    token = row")
        warps = max(1, min(16, _power(-(-self.most // NUMBERS_PER_WARP))))
        return RowKernel("\n".join([*head, *begin, *self.lines, ""]), self.given, pieces, warps)

    def _is_stored(self, step: Instruction) -> bool:
        return step.op != ops.SUM and (step.target is None or step.placed is not None or not _home(step).local)

    def _reads_what_it_writes(self, stored: list[Instruction]) -> bool:
        """Tell whether something that is stored is read from memory in this stage, perhaps by another program."""
        homes = {written(step) for step in stored} - {None}
        return any(home in homes for step in self.steps for home in reads(step))

    def _in_pieces(self, stored: list[Instruction]) -> int:
        self.lines.append("    piece = tl.program_id(1)")
        first = 0
        for step in stored:
            chunk = min(CHUNK, _power(step.outer * step.inner))
            last = first - (-step.outer * step.inner // chunk)
            self.lines.append(f"    if (piece >= {first}) & (piece < {last}):")
            self.indent, self.known, self.sums = "        ", {}, {}
            self._store(step, f"(piece - {first}) * {chunk}", chunk)
            self.indent, first = "    ", last
        return first

    def _whole(self, step: Instruction) -> None:
        count = step.outer * step.inner
        if count <= MOST_AT_ONCE:
            self._store(step, "0", _power(count))
            return
        self._loop(count, lambda at: self._store(step, at, MOST_AT_ONCE))

    def _loop(self, count: int, body: Callable[[str], Any]) -> None:
        """`body` for each MOST_AT_ONCE of `count` numbers."""
        name = self._name()
        self.lines.append(f"{self.indent}for {name} in range(0, {count}, {MOST_AT_ONCE}):")
        known, self.known, self.indent = self.known, {}, self.indent + "    "
        body(name)
        self.known, self.indent = known, self.indent[:-4]

    # ---- instructions that write

    def _store(self, step: Instruction, at: str, chunk: int) -> None:
        """The numbers of an instruction from `at` on."""
        count = step.outer * step.inner
        e, mask = self._numbers(at, chunk, count)
        self._wait(step)
        if step.placed is not None:
            self._write_to_cache(step, e, mask)
            return
        home = None if step.target is None else step.target[0].home
        if step.op == ops.COPY and isinstance(home, Buffer) and home.size == 2:  # words that are copied as they are
            count, chunk = 2 * count, 2 * chunk
            e = self._value(("numbers", at, chunk), f"2 * ({at}) + tl.arange(0, {chunk})")
            mask = self._value(("fits", e, count), f"{e} < {count}")
            source, target = step.sources[0][0], step.target
            assert target is not None
            self._write(home, _plus(e, target[0].start), self._load(source.home, _plus(e, source.start), mask), mask)
            return
        value = self._computed(step, e, mask)
        if step.target is None:
            where = f"{self._pointer(SCORES)} + row * {self.vocab} + {e}"
            self.lines.append(f"{self.indent}tl.store({where}, {value}.to(tl.{self.scores}){self._masked(mask)})")
            return
        into = self._address_of(step.target, step, e)
        self._write(home, into, value, mask)
        if isinstance(home, Buffer) and home.size == 4:
            self.known["held", home, into, mask] = value

    def _write(self, home: Any, into: str, value: str, mask: str) -> None:
        kind = f"{self._pointer(home)}.dtype.element_ty"
        where = f"{self._line_of(home, 'row')} + {into}"
        self.lines.append(f"{self.indent}tl.store({where}, {value}.to({kind}){self._masked(mask)})")
        self.waits.add(home)

    def _write_to_cache(self, step: Instruction, e: str, mask: str) -> None:
        """Keys or values go to their slot."""
        assert step.placed is not None
        pointer = self._pointer(Slotted(step.placed))
        about = f"{self._pointer(META)} + token * {self._pointer(META)}_line"
        slot = self._value(("meta", "slot"), f"tl.load({about} + {tree_meta.SLOT}).to(tl.int64)")
        position = f"tl.load({about} + {tree_meta.PAST}).to(tl.int64) + tl.load({about} + {tree_meta.NODE})"
        cache_position = self._value(("meta", "cache position"), position)
        value = self._operand(step.sources[0], step, e, mask)
        where = f"{pointer} + {slot} * {pointer}_slot + ({e} // {step.inner}) * {pointer}_head"
        where += f" + {cache_position} * {pointer}_position + {e} % {step.inner}"
        fits = f"({slot} >= 0)" + (f" & {mask}" if mask else "")
        self.lines.append(f"{self.indent}tl.store({where}, {value}.to({pointer}.dtype.element_ty), mask={fits})")

    def _sum(self, step: Instruction) -> None:
        self._wait(step)
        home = _home(step)
        if step.outer == 1:
            if step.inner <= MOST_AT_ONCE:
                self.sums[home] = self._named(f"tl.sum({self._addends(step, '0', _power(step.inner))}, 0)")
            else:
                total = self._named(f"tl.full([{MOST_AT_ONCE}], 0.0, tl.float32)")

                def add(at: str) -> None:
                    value = self._addends(step, at, MOST_AT_ONCE)
                    self.lines.append(f"{self.indent}{total} = {total} + {value}")

                self._loop(step.inner, add)
                self.sums[home] = self._named(f"tl.sum({total}, 0)")
            return
        rows, columns = _power(step.outer), _power(step.inner)
        if rows * columns > 2 * MOST_AT_ONCE:
            raise Unsupported(f"{step.outer} sums of {step.inner} numbers each")
        self.most = max(self.most, rows * columns)
        o = self._named(f"tl.arange(0, {rows})")
        e = self._named(f"{o}[:, None] * {step.inner} + tl.arange(0, {columns})[None, :]")
        mask = self._named(f"({o} < {step.outer})[:, None] & (tl.arange(0, {columns}) < {step.inner})[None, :]")
        value = self._operand(step.sources[0], step, e, mask)
        value = self._named(f"tl.sum(tl.where({mask}, {value}, 0.0), 1)")
        assert step.target is not None
        self._write(home, _plus(o, step.target[0].start), value, f"({o} < {step.outer})")

    def _addends(self, step: Instruction, at: str, chunk: int) -> str:
        e, mask = self._numbers(at, chunk, step.inner)
        value = self._operand(step.sources[0], step, e, mask)
        return self._named(f"tl.where({mask}, {value}, 0.0)") if mask else value

    def _numbers(self, at: str, chunk: int, count: int) -> tuple[str, str]:
        """`chunk` indices from `at` on, and which are below `count`: "" for all."""
        self.most = max(self.most, chunk)
        e = self._value(("numbers", at, chunk), ("" if at == "0" else f"{at} + ") + f"tl.arange(0, {chunk})")
        return e, "" if count == chunk and at == "0" else self._value(("fits", e, count), f"{e} < {count}")

    def _wait(self, step: Instruction) -> None:
        """Wait for what other threads of the program have written, if the instruction reads it."""
        if self.waits & self._read_by(step):
            self.lines.append(f"{self.indent}tl.debug_barrier()")
            self.waits.clear()

    def _read_by(self, step: Instruction) -> set[Buffer]:
        """Buffers in memory that it reads, itself or by what is computed for it."""
        found: set[Buffer] = set()
        for home in reads(step):
            if home.local and home not in self.sums:
                for writer in self.writers[home]:
                    found |= self._read_by(writer)
            else:
                found.add(home)
        return found

    # ---- what is computed

    def _computed(self, step: Instruction, e: str, mask: str) -> str:
        """The numbers of an instruction that `e` counts."""
        if step.op == ops.EMBED:
            table = step.sources[0][0].home
            _, _, _, added, which = step.more
            ids = self._pointer(IDS if which == ops.IDS else POSITIONS)
            assert isinstance(table, torch.Tensor)
            line = self._value(("id", which, added), f"tl.load({ids} + token) + {added}")
            where = f"{self._pointer(table)} + {line} * {table.stride(0)} + {e}"
            return self._named(f"tl.load({where}{self._masked(mask, True)}).to(tl.float32)")
        if step.op == ops.POSITION:
            return self._named(f"(tl.load({self._pointer(POSITIONS)} + token) + {step.more[0]}).to(tl.float32)")
        values = [self._operand(source, step, e, mask) for source in step.sources]
        if step.op not in CODE:
            raise Unsupported(f"instruction {step.op} on a GPU")
        text = CODE[step.op].format(*values)
        return self._named(ROUNDED[step.rounds].format(text)) if step.rounds != ops.NOT or text != values[0] else text

    def _address_of(self, operand: tuple[View, int, int], step: Instruction, e: str) -> str:
        """Return where in its buffer an operand's numbers stand that `e` counts."""
        view, outer, inner = operand
        if step.outer == 1 or outer == step.inner * inner:
            scaled = "0" if inner == 0 else e if inner == 1 else f"{e} * {inner}"
            return self._index(_plus(scaled, view.start))
        if (outer, inner) == (0, 0):
            return str(view.start)
        row = self._index(f"{e} // {step.inner}") if outer else ""
        column = self._index(f"{e} % {step.inner}") if inner else ""
        parts = [f"{row} * {outer}" if outer != 1 else row] if outer else []
        parts += [f"{column} * {inner}" if inner != 1 else column] if inner else []
        return self._index(_plus(" + ".join(parts), view.start))

    def _index(self, text: str) -> str:
        return text if text.isidentifier() or text.isdecimal() else self._value(("index", text), text)

    def _operand(self, operand: tuple[View, int, int], step: Instruction, e: str, mask: str) -> str:
        return self._load(operand[0].home, self._address_of(operand, step, e), mask)

    def _load(self, home: Any, at: str, mask: str) -> str:
        """Numbers of a buffer or of a constant, as float32."""
        mask = "" if at.isdecimal() else mask
        if isinstance(home, torch.Tensor):
            if home.numel() == 1:
                return repr(float(home)).replace("inf", "float('inf')")
            text = f"tl.load({self._pointer(home)} + {at}{self._masked(mask, True)}).to(tl.float32)"
            return self._value(("constant", id(home), at, mask), text)
        if home in self.sums:
            return self.sums[home]
        held = "held", home, at, mask
        if held in self.known:
            return self.known[held]
        if home.local:
            self.known[held] = self._inlined(home, at, mask)
            return self.known[held]
        if home in self.products and self.in_parts:
            return self._value(held, self._product(home, at, mask))
        where = f"{self._line_of(home, self._row_of(home))} + {at}"
        return self._value(held, f"tl.load({where}{self._masked(mask, True)}).to(tl.float32)")

    def _line_of(self, home: Buffer, row: str) -> str:
        return f"{self._pointer(home)} + {row} * {home.stride // size_in(home, self.products, self.in_parts)}"

    def _row_of(self, home: Buffer) -> str:
        if not self.stage.late or home.late:
            return "row"
        self._pointer(KEPT)
        return "token"

    def _product(self, home: Buffer, at: str, mask: str) -> str:
        """Numbers that a product has left as partial sums: these together, with the bias, rounded as the product's are."""
        product = self.products[home]
        where = f"{self._line_of(home, self._row_of(home))} + {at}"
        masked = self._masked(mask, True)
        parts = [f"tl.load({_plus(where, part * product.weight.outputs)}{masked})" for part in range(product.weight.parts)]
        text = functools.reduce(lambda sums, part: f"({sums} + {part})", parts)
        if product.bias is not None:
            text = f"({text} + {self._load(product.bias, at, mask)})"
        kind = product.weight.dtype
        return text if kind == torch.float32 else f"({text}).to(tl.{NAMES[kind]}).to(tl.float32)"

    def _inlined(self, home: Buffer, at: str, mask: str) -> str:
        """Numbers of a buffer without memory, computed by the instructions that would have written them."""
        result = ""
        for writer in self.writers[home]:
            target = writer.target
            assert target is not None
            view, outer, inner = target
            count = writer.outer * writer.inner
            relative = at if not view.start else self._index(f"{at} - {view.start}")
            if inner == 1 and (writer.outer == 1 or outer == writer.inner):
                covered = "" if count == home.numbers else f"(({relative} >= 0) & ({relative} < {count}))"
                e = relative
            else:
                if inner < 1 or (writer.outer > 1 and outer < inner * (writer.inner - 1) + 1):
                    raise Unsupported("results that lie over each other")
                within = self._index(f"{relative} % {outer}") if writer.outer > 1 else relative
                conditions = [f"({relative} >= 0)", f"({within} < {(writer.inner - 1) * inner + 1})"]
                conditions += [f"({relative} < {writer.outer * outer})"] if writer.outer > 1 else []
                conditions += [f"({within} % {inner} == 0)"] if inner > 1 else []
                covered = f"({' & '.join(conditions)})"
                row = f"({relative} // {outer}) * {writer.inner} + " if writer.outer > 1 else ""
                e = self._index(row + (within if inner == 1 else f"{within} // {inner}"))
            if covered:
                covered = self._value(("covered", covered), covered)
            value = self._computed(writer, e, " & ".join(filter(None, (mask, covered))))
            result = value if not covered else self._named(f"tl.where({covered}, {value}, {result or '0.0'})")
        return result

    # ---- names

    def _named(self, text: str) -> str:
        if text.isidentifier():
            return text
        name = self._name()
        self.lines.append(f"{self.indent}{name} = {text}")
        return name

    def _value(self, key: tuple[Any, ...], text: str) -> str:
        if key not in self.known:
            self.known[key] = self._named(text)
        return self.known[key]

    def _name(self) -> str:
        self.names += 1
        return f"x{self.names}"

    def _masked(self, mask: str, other: bool = False) -> str:
        return f", mask={mask}" + (", other=0.0" if other else "") if mask else ""

    def _pointer(self, given: Argument) -> str:
        for number, each in enumerate(self.given):
            if each is given or (isinstance(given, Slotted | str) and each == given):
                return f"p{number}"
        self.given.append(given)
        return f"p{len(self.given) - 1}"
